"""Reading JSON text that somebody else wrote: every way it can be wrong has its message."""

from __future__ import annotations

import json
import re
from typing import Any

from hitproof.model.errors import BadInput, shown

_HALF = re.compile(r"\\u[dD][89a-fA-F]")


def read_json(text: str) -> Any:
    """The value that ``text`` spells; BadInput if it is not JSON or names a field twice."""
    if not text.strip():
        raise BadInput("the file is empty; give a JSON file")
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except json.JSONDecodeError as error:
        raise BadInput(f"not JSON: {error}") from None
    except RecursionError:
        raise BadInput("not a file of hitproof: it is nested too deeply to be read") from None
    except ValueError:
        raise BadInput("not a file of hitproof: it has a number of more than 4300 digits") from None
    if _HALF.search(text):
        try:
            json.dumps(data, ensure_ascii=False).encode()
        except UnicodeEncodeError:
            raise BadInput("its text has half a character (a lone \\ud800 to \\udfff); remove it") from None
    return data


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in pairs:
        if name in found:
            raise BadInput(f"field {shown(name)} is given twice; keep one")
        found[name] = value
    return found
