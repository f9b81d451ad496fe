"""``Trace``: a config and ops in one readable JSON file. The only thing that searchers, targets,
properties and counterexamples exchange.
"""

from __future__ import annotations

import json
from typing import Any

import attrs

from hitproof.model.config import CacheConfig
from hitproof.model.content import Tokens
from hitproof.model.errors import BadInput, shown
from hitproof.model.ops import Abort, Op, Submit, parse_op
from hitproof.model.reading import read_json

SCHEMA = 1
MOST_OPS = 100_000


def known_schema(where: str, schema: object, newest: int) -> None:
    """BadInput unless a file's ``schema`` is the one that this version reads."""
    if isinstance(schema, bool) or not isinstance(schema, int) or schema != newest:
        raise BadInput(
            f"{where}schema {shown(schema)} is not known: this version reads {newest}; "
            "use the hitproof that wrote the file"
        )


@attrs.frozen(kw_only=True, slots=True)
class Trace:
    """A config and what to do with it. ``note`` is free text about where the trace came from."""

    config: CacheConfig
    ops: tuple[Op, ...]
    note: str = attrs.field(default="", eq=False)

    def __attrs_post_init__(self) -> None:
        if not self.ops:
            raise BadInput("trace: ops is empty; give at least one op")
        if len(self.ops) > MOST_OPS:
            raise BadInput(f"trace: {len(self.ops)} ops; the most is {MOST_OPS}")
        outputs: dict[str, int] = {}
        for i, op in enumerate(self.ops):
            if isinstance(op, Abort) and op.request not in outputs:
                raise BadInput(
                    f"trace: ops[{i}]: abort {op.request}: no such request before it; submit it first"
                )
            if isinstance(op, Submit):
                self._check_submit(i, op, outputs)
                outputs[op.request] = op.output_tokens

    def _check_submit(self, i: int, op: Submit, outputs: dict[str, int]) -> None:
        if op.request in outputs:
            raise BadInput(f"trace: ops[{i}]: request {op.request} is submitted twice; give it another name")
        length = len(resolve(op, outputs, where=f"trace: ops[{i}]: "))
        if length + op.output_tokens > self.config.max_model_len:
            raise BadInput(
                f"trace: ops[{i}]: request {op.request} has {length} prompt + {op.output_tokens} output tokens, "
                f"more than max_model_len {self.config.max_model_len}; shorten it or raise max_model_len"
            )

    def to_json(self) -> dict[str, Any]:
        """As stored in a file."""
        out: dict[str, Any] = {
            "schema": SCHEMA,
            "config": self.config.to_json(),
            "ops": [str(op) for op in self.ops],
        }
        if self.note:
            out["note"] = self.note
        return out

    def dumps(self) -> str:
        """The file's text."""
        return json.dumps(self.to_json(), indent=2) + "\n"

    @classmethod
    def from_json(cls, data: object) -> Trace:
        """Read a trace; BadInput names the field that is wrong."""
        if not isinstance(data, dict):
            raise BadInput(f"trace: must be an object with schema, config and ops, not {type(data).__name__}")
        if "schema" not in data:
            raise BadInput(f"trace: schema is missing; this version writes {SCHEMA}")
        known_schema("trace: ", data["schema"], SCHEMA)
        for name in data:
            if name not in ("schema", "config", "ops", "note"):
                raise BadInput(f"trace: unknown field {shown(name)}; known fields: schema, config, ops, note")
        for name in ("config", "ops"):
            if name not in data:
                raise BadInput(f"trace: {name} is missing")
        if not isinstance(data["ops"], list) or not all(isinstance(line, str) for line in data["ops"]):
            raise BadInput("trace: ops must be a list of lines such as 'submit r1 S:64 out=1'")
        if not isinstance(data.get("note", ""), str):
            raise BadInput("trace: note must be text")
        ops = []
        for i, line in enumerate(data["ops"]):
            try:
                ops.append(parse_op(line))
            except BadInput as error:
                raise BadInput(f"trace: ops[{i}]: {error}") from None
        return cls(config=CacheConfig.from_json(data["config"]), ops=tuple(ops), note=data.get("note", ""))

    @classmethod
    def loads(cls, text: str) -> Trace:
        """Read a trace from a file's text."""
        try:
            data = read_json(text)
        except BadInput as error:
            raise BadInput(f"trace: {error}") from None
        return cls.from_json(data)


def resolve(op: Submit, outputs: dict[str, int], where: str = "") -> Tokens:
    """The prompt's tokens; ``outputs`` gives the output length of each earlier request."""
    tokens = Tokens()
    for span in op.prompt:
        stop = span.stop
        if stop is None:
            if span.stream[1:] not in outputs:
                raise BadInput(f"{where}{span}: no such request before it; submit it first")
            stop = outputs[span.stream[1:]]
        tokens.append((span.stream, span.start, stop))
    return tokens
