"""``RealManager``: vLLM's own ``KVCacheManager`` behind the model's ``Manager`` protocol.

Runs only in a worker process. Everything that differs between releases is a row of ``ARGUMENTS`` or
``METHODS``; which form a tree has is read from the signatures of its own functions, so a fork needs no
version number.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
import traceback
from typing import TYPE_CHECKING, Any, cast

import attrs

from hitproof.model import (
    NO_KEY,
    BadInput,
    CacheConfig,
    Event,
    Group,
    HarnessFault,
    Lookup,
    ManagerFault,
    Request,
    Snapshot,
    Tokens,
    shown,
)
from hitproof.replay import core

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable
    from pathlib import Path

    from hitproof.model.content import Piece
    from hitproof.model.observation import Tables

ANY = object()
"""A value that an older form, which lacks the argument, works out by itself."""


@attrs.frozen(slots=True)
class Argument:
    """An argument that only some releases have. ``neutral``: the value that means "not passed"."""

    api: str
    name: str
    releases: str
    neutral: object


ARGUMENTS = (
    Argument("KVCacheManager", "scheduler_block_size", "0.23.0+", ANY),
    Argument("KVCacheManager", "max_num_batched_tokens", "0.20.0-0.25.1", ANY),
    Argument("KVCacheManager", "max_in_flight_tokens", "0.26.0+", ANY),
    Argument("KVCacheManager", "watermark", "0.24.0+", 0.0),
    Argument("KVCacheManager.allocate_slots", "full_sequence_must_fit", "0.21.0+", False),
    Argument("KVCacheManager.allocate_slots", "has_scheduled_reqs", "0.24.0+", ANY),
    Argument("KVCacheConfig", "prefix_cache_retention_interval", "0.29.0+", None),
    Argument("SlidingWindowSpec", "extra_retained_tokens", "0.28.0+", 0),
)
"""Arguments passed where the tree's own function has them. Dropping one that is not neutral is a fault."""

METHODS = (
    ("KVCacheManager.can_fit_full_sequence", "0.19.0-0.20.2", "the admission gate, called before"),
    ("KVCacheManager.get_computed_blocks", "0.26.0+", "a third value: the shared-prefix junction"),
    ("Request.shared_prefix_boundary", "0.26.0+", "set to that value before allocate_slots"),
    ("BlockPool.cached_block_hashes_by_block", "0.24.0+", "the further keys of a block"),
    ("envs.VLLM_PREFIX_CACHE_RETENTION_INTERVAL", "0.23.0-0.28.0", "read when the coordinator is built"),
    ("BlockHashListWithBlockSize", "0.19.0-0.23.0", "a large block's hash is those of its parts in a row"),
    ("BlockStored.group_idx", "0.20.0+", "the group of an event"),
)
"""Differences that are not arguments: what, which releases have it, how it is used."""

HASH_BYTES = 32
"""Length of a sha256 block hash."""

RETENTION_VARIABLE = "VLLM_PREFIX_CACHE_RETENTION_INTERVAL"


@attrs.frozen(kw_only=True, slots=True)
class LoadedVllm:
    """The parts of a loaded vLLM that the adapter uses. ``touched``: forbidden stand-ins used."""

    loader: str
    manager: Any
    utils: Any
    interface: Any
    request: Any
    lora: Any
    sampling: Any
    envs: Any
    sha256: Any
    dtype: Any
    touched: list[str] = attrs.field(factory=list)


def load(root: Path, loader: str) -> LoadedVllm:
    """Load vLLM into this process: ``core`` from the tree at ``root`` alone; ``env`` the installed
    one with the tree in front of it.
    """
    if not __debug__:
        raise HarnessFault("worker: Python runs without assertions; unset PYTHONOPTIMIZE")
    for name in [name for name in os.environ if name.startswith("VLLM_")]:
        del os.environ[name]
    # Events then carry block hashes as bytes, not their low 64 bits.
    os.environ["VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES"] = "0"
    os.environ["VLLM_LOGGING_LEVEL"] = "ERROR"
    core_loader = None
    if loader == "core":
        core_loader = core.install(root)
    else:
        sys.path.insert(0, str(root))
    module = importlib.import_module
    loaded = LoadedVllm(
        loader=loader,
        manager=module("vllm.v1.core.kv_cache_manager"),
        utils=module("vllm.v1.core.kv_cache_utils"),
        interface=module("vllm.v1.kv_cache_interface"),
        request=module("vllm.v1.request"),
        lora=module("vllm.lora.request"),
        sampling=module("vllm.sampling_params").SamplingParams,
        envs=module("vllm.envs"),
        sha256=module("vllm.utils.hashing").sha256,
        dtype=module("torch").bfloat16,
        touched=core_loader.touched if core_loader else [],
    )
    if core_loader:
        core_loader.seal()
    loaded.utils.init_none_hash(loaded.sha256)
    return loaded


def call(api: str, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
    """Call ``function`` with those of ``values`` that it has, by the rules of ``ARGUMENTS``."""
    for row in _lacking(api, getattr(function, "__func__", function)):
        value = values.pop(row.name, row.neutral)
        if row.neutral is not ANY and value != row.neutral:
            raise HarnessFault(f"{api} of this tree has no argument {row.name!r}, which {value!r} needs")
    return function(*args, **values)


@functools.cache
def _lacking(api: str, function: Callable[..., Any]) -> tuple[Argument, ...]:
    """The rows of ``ARGUMENTS`` that ``function`` does not have."""
    has = inspect.signature(function).parameters
    return tuple(row for row in ARGUMENTS if row.api == api and row.name not in has)


class TokenIds:
    """Token ids of content, interned per run: equal tokens get equal small ids."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}
        self._tokens: list[tuple[str, int]] = []

    def ids(self, pieces: Iterable[Piece]) -> list[int]:
        """One id per token."""
        found = []
        for stream, start, stop in pieces:
            for at in range(start, stop):
                number = self._ids.setdefault((stream, at), len(self._tokens))
                if number == len(self._tokens):
                    self._tokens.append((stream, at))
                found.append(number)
        return found

    def pieces(self, ids: Iterable[int]) -> tuple[Piece, ...]:
        """The maximal pieces that ``ids`` spell."""
        tokens = Tokens()
        for number in ids:
            stream, at = self._tokens[number]
            tokens.append((stream, at, at + 1))
        return tuple(tokens.pieces)


class RealManager:
    """vLLM's manager for one run. ``config`` says what is built; hashes become keys by interning
    them in the order in which they appear in ``Request.block_hashes``, as the model's ``KeyTable``.
    """

    def __init__(self, vllm: LoadedVllm, config: CacheConfig, *, record_events: bool = True) -> None:
        self._vllm = vllm
        self._config = config
        self._tokens = TokenIds()
        self._key_of: dict[bytes, int] = {}
        self._parts_of: dict[bytes, tuple[int, int, tuple[int, ...]]] = {}
        self._lora_ids: dict[str, int] = {}
        self._requests: dict[str, Any] = {}
        self._hasher = None
        if config.enable_prefix_caching:
            self._hasher = vllm.utils.get_request_block_hasher(config.key_block_size, vllm.sha256)
        self._manager = self._build(record_events)
        self._pool = self._manager.block_pool
        self._types = self._manager.coordinator.single_type_managers

    def _build(self, record_events: bool) -> Any:
        config, interface = self._config, self._vllm.interface
        groups = [
            interface.KVCacheGroupSpec([f"layer.{i}"], self._spec(group))
            for i, group in enumerate(config.groups)
        ]
        retention = config.retention
        by_variable = hasattr(self._vllm.envs, RETENTION_VARIABLE) and not _has_field(
            interface.KVCacheConfig, "prefix_cache_retention_interval"
        )
        if by_variable and retention is not None:
            os.environ[RETENTION_VARIABLE] = str(retention)
        try:
            kv_cache_config = call(
                "KVCacheConfig",
                interface.KVCacheConfig,
                num_blocks=config.num_blocks,
                kv_cache_tensors=[],
                kv_cache_groups=groups,
                prefix_cache_retention_interval=None if by_variable else retention,
            )
            return call(
                "KVCacheManager",
                self._vllm.manager.KVCacheManager,
                kv_cache_config=kv_cache_config,
                max_model_len=config.max_model_len,
                scheduler_block_size=config.scheduler_block_size,
                hash_block_size=config.key_block_size,
                max_num_batched_tokens=config.max_num_batched_tokens,
                max_in_flight_tokens=config.max_num_batched_tokens,
                enable_caching=config.enable_prefix_caching,
                use_eagle=config.use_eagle,
                enable_kv_cache_events=record_events,
                watermark=config.watermark,
            )
        except AssertionError as error:
            raise BadInput(f"vLLM refuses this config: {_where(error)}") from error
        except ValueError as error:
            raise BadInput(f"vLLM refuses this config: {error}") from error
        finally:
            os.environ.pop(RETENTION_VARIABLE, None)

    def _spec(self, group: Group) -> Any:
        """One head of size 1: page sizes in bytes play no part at this height."""
        interface = self._vllm.interface
        shape = {"block_size": group.block_size, "num_kv_heads": 1, "head_size": 1, "dtype": self._vllm.dtype}
        if group.kind == "full":
            return interface.FullAttentionSpec(**shape)
        if group.kind == "chunked_local":
            return interface.ChunkedLocalAttentionSpec(**shape, attention_chunk_size=group.chunk)
        return call(
            "SlidingWindowSpec",
            interface.SlidingWindowSpec,
            **shape,
            sliding_window=group.window,
            extra_retained_tokens=group.extra_retained_tokens,
        )

    def _guard(self, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
        """Call into the tree. What vLLM raises on purpose is a ManagerFault, the rest a HarnessFault."""
        try:
            result = function(*args, **values)
        except HarnessFault:
            raise
        except AssertionError as error:
            raise ManagerFault("assertion", _where(error)) from error
        except Exception as error:
            if isinstance(error, ValueError) and str(error).startswith("Cannot get "):
                raise ManagerFault("pool exhausted", str(error)) from error
            raise HarnessFault(f"vLLM raised {''.join(traceback.format_exception(error))}") from error
        if self._vllm.touched:
            raise HarnessFault(f"core loader: the tree touched and hid {', '.join(self._vllm.touched)}")
        return result

    def add(self, request: Request) -> tuple[int, ...]:
        """Build vLLM's ``Request``, which hashes its prompt."""
        identity = request.identity
        lora = None
        if identity.lora is not None:
            number = self._lora_ids.setdefault(identity.lora, len(self._lora_ids) + 1)
            lora = self._vllm.lora.LoRARequest(
                lora_name=_word(identity.lora), lora_int_id=number, lora_path=_word(identity.lora_path or "")
            )
        real = self._guard(
            self._vllm.request.Request,
            request_id=request.id,
            prompt_token_ids=self._tokens.ids(request.tokens.pieces),
            sampling_params=self._vllm.sampling(max_tokens=request.output_tokens),
            pooling_params=None,
            lora_request=lora,
            cache_salt=None if identity.salt is None else _word(identity.salt),
            block_hasher=self._hasher,
        )
        self._requests[request.id] = real
        return self._intern(real.block_hashes)

    def append(self, request: Request) -> tuple[int, ...]:
        """Append the tokens that the request has grown by."""
        real = self._requests[request.id]
        before = len(real.block_hashes)
        grown = request.tokens.slice(real.num_tokens, request.num_tokens)
        self._guard(real.append_output_token_ids, self._tokens.ids(grown))
        return self._intern(real.block_hashes[before:])

    def _intern(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        return tuple(self._key_of.setdefault(key, len(self._key_of)) for key in hashes)

    def _key(self, key: bytes) -> int:
        """The number of a block hash. To 0.23.0 a block larger than the hash block carries the
        hashes of all its hash blocks in a row; the last one, being chained, stands for them.
        """
        numbers = [self._key_of.get(key[i : i + HASH_BYTES]) for i in range(0, len(key), HASH_BYTES)]
        if not numbers or None in numbers:
            raise HarnessFault(f"vLLM shows block hash {key.hex()}, which no request has")
        return cast("int", numbers[-1])

    def step(self) -> None:
        """``new_step_starts``."""
        self._guard(self._manager.new_step_starts)

    def lookup(self, request: Request) -> Lookup:
        """``get_computed_blocks``."""
        found = self._guard(self._manager.get_computed_blocks, self._sync(request))
        if type(found[1]) is not int or found[1] < 0:
            raise HarnessFault(f"vLLM's get_computed_blocks says that the hit is {shown(found[1])} tokens")
        return Lookup(
            hit_tokens=found[1],
            blocks=_tables(found[0]),
            junction=found[2] if len(found) > 2 else 0,
        )

    def _sync(self, request: Request) -> Any:
        """What vLLM's scheduler would have written into the request by now."""
        real, status = self._requests[request.id], self._vllm.request.RequestStatus
        real.num_computed_tokens = request.computed
        real.status = status.RUNNING if request.running else status.WAITING
        if hasattr(real, "shared_prefix_boundary"):
            real.shared_prefix_boundary = request.junction
        return real

    def allocate(
        self, request: Request, new_tokens: int, hit: Lookup | None, *, must_fit: bool, beside: bool
    ) -> Tables | None:
        """The admission gate, where it is a call of its own, then ``allocate_slots``."""
        manager, real = self._manager, self._sync(request)
        adopted: dict[str, Any] = {}
        if hit is not None:
            blocks = tuple([self._pool.blocks[b] for b in group] for group in hit.blocks)
            adopted = {
                "num_new_computed_tokens": hit.hit_tokens,
                "new_computed_blocks": manager.create_kv_cache_blocks(blocks),
            }
        if must_fit and hasattr(manager, "can_fit_full_sequence"):
            if not self._guard(manager.can_fit_full_sequence, real, **adopted):
                return None
            must_fit = False
        new = self._guard(
            call,
            "KVCacheManager.allocate_slots",
            manager.allocate_slots,
            real,
            new_tokens,
            **adopted,
            full_sequence_must_fit=must_fit,
            has_scheduled_reqs=beside,
        )
        return None if new is None else _tables(new)

    def free(self, request: Request) -> None:
        """``free``."""
        self._guard(self._manager.free, self._requests[request.id])

    def reset(self) -> bool:
        """``reset_prefix_cache``."""
        return bool(self._guard(self._manager.reset_prefix_cache))

    def take_events(self) -> tuple[Event, ...]:
        """Events since the last call, oldest first."""
        return tuple(self._event(event) for event in self._guard(self._manager.take_events))

    def _event(self, event: Any) -> Event:
        kind = type(event).__name__
        group = getattr(event, "group_idx", None)
        if kind == "AllBlocksCleared":
            return Event(kind="cleared", group=group)
        keys = tuple(map(self._key, event.block_hashes))
        if kind == "BlockRemoved":
            return Event(kind="removed", group=group, keys=keys)
        if kind != "BlockStored":
            raise HarnessFault(f"vLLM emitted an event of unknown kind {kind}")
        parent = event.parent_block_hash
        return Event(
            kind="stored",
            group=group,
            keys=keys,
            parent=NO_KEY if parent is None else self._key(parent),
            tokens=self._tokens.pieces(event.token_ids),
            block_size=event.block_size,
            extra=None if event.extra_keys is None else tuple(map(_words, event.extra_keys)),
            lora=event.lora_name,
        )

    def snapshot(self) -> Snapshot:
        """The whole state, read from the pool and the single-type managers."""
        pool = self._pool
        free = tuple(block.block_id for block in pool.free_block_queue.get_all_free_blocks())
        if len(free) != pool.get_num_free_blocks():
            raise HarnessFault(
                f"vLLM counts {pool.get_num_free_blocks()} free blocks, its free queue has {len(free)}"
            )
        aliases = getattr(pool, "cached_block_hashes_by_block", {})
        tables = [manager.req_to_blocks for manager in self._types]
        live = sorted({request for table in tables for request, blocks in table.items() if blocks})
        return Snapshot(
            ref_count=tuple([block.ref_cnt for block in pool.blocks]),
            free_queue=free,
            keys=tuple(
                [
                    None
                    if (key := block.block_hash) is None
                    else self._keys(key, aliases.get(block.block_id))
                    for block in pool.blocks
                ]
            ),
            index=self._index(),
            tables=tuple(
                (request, tuple(_ids(table.get(request, ())) for table in tables)) for request in live
            ),
        )

    def _keys(self, key: bytes, aliases: Iterable[bytes] | None) -> tuple[int, int, tuple[int, ...]]:
        """Group, own key and aliases of a block. Remembered without aliases: snapshots ask for all."""
        parts = self._parts_of.get(key)
        if parts is None:
            parts = int.from_bytes(key[-4:], "big"), self._key(self._vllm.utils.get_block_hash(key)), ()
            self._parts_of[key] = parts
        if aliases:
            return parts[0], parts[1], tuple(sorted(self._keys(alias, None)[1] for alias in aliases))
        return parts

    def _index(self) -> tuple[tuple[tuple[int, tuple[int, ...]], ...], ...]:
        index: list[list[tuple[int, tuple[int, ...]]]] = [[] for _ in self._config.groups]
        for key, holders in self._pool.cached_block_hash_to_block._cache.items():
            group, own, _ = self._keys(key, None)
            blocks = tuple(holders) if isinstance(holders, dict) else (holders.block_id,)
            index[group].append((own, blocks))
        return tuple(tuple(sorted(entries)) for entries in index)


def _has_field(cls: type, name: str) -> bool:
    return name in inspect.signature(cls).parameters


def _word(text: str) -> str:
    """One object per word: pickle, which ``sha256`` hashes, shows whether two equal strings are one
    object, so without this two requests with equal names could get different hashes.
    """
    return sys.intern(text)


def _words(extra: Iterable[Any] | None) -> tuple[str, ...] | None:
    return None if extra is None else tuple(extra)


def _ids(blocks: Iterable[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)


def _tables(blocks: Any) -> Tables:
    return tuple(map(_ids, blocks.blocks))


def _where(error: AssertionError) -> str:
    """The innermost frame of an assertion, as file:line and its source."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    return f"{os.path.basename(frame.filename)}:{frame.lineno}: {frame.line}"
