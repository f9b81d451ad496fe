"""``RealManager``: vLLM's own ``KVCacheManager`` behind the model's ``Manager`` protocol.

Runs only in a worker process.
"""

from __future__ import annotations

import sys
import traceback
from typing import TYPE_CHECKING, Any, cast

from hitproof.model import (
    NO_KEY,
    CacheConfig,
    Event,
    HarnessFault,
    Lookup,
    ManagerFault,
    Request,
    Snapshot,
    Tokens,
    shown,
)
from hitproof.replay.adapter import LoadedVllm, block_hasher, build_manager, call, where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from hitproof.model.content import Piece
    from hitproof.model.observation import Tables

HASH_BYTES = 32
"""Length of a sha256 block hash."""


class TokenIds:
    """Token ids of content, interned per run: equal tokens get equal small ids."""

    def __init__(self) -> None:
        self._ids: dict[tuple[str, int], int] = {}
        self.tokens: list[tuple[str, int]] = []

    def ids(self, pieces: Iterable[Piece]) -> list[int]:
        """One id per token."""
        found = []
        for stream, start, stop in pieces:
            for at in range(start, stop):
                number = self._ids.setdefault((stream, at), len(self.tokens))
                if number == len(self.tokens):
                    self.tokens.append((stream, at))
                found.append(number)
        return found

    def pieces(self, ids: Iterable[int]) -> tuple[Piece, ...]:
        """The maximal pieces that ``ids`` spell."""
        tokens = Tokens()
        for number in ids:
            stream, at = self.tokens[number]
            tokens.append((stream, at, at + 1))
        return tuple(tokens.pieces)


class RealManager:
    """vLLM's manager for one run. ``config`` says what is built, unless ``built`` is given; hashes
    become keys by interning them in the order in which they appear in ``Request.block_hashes``, as
    the model's ``KeyTable``. ``requests``: vLLM's own, by id.
    """

    def __init__(
        self, vllm: LoadedVllm, config: CacheConfig, *, record_events: bool = True, built: Any = None
    ) -> None:
        self._vllm = vllm
        self._config = config
        self.tokens = TokenIds()
        self._key_of: dict[bytes, int] = {}
        self._parts_of: dict[bytes, tuple[int, int, tuple[int, ...]]] = {}
        self._lora_ids: dict[str, int] = {}
        self.requests: dict[str, Any] = {}
        self._hasher = block_hasher(vllm, config)
        self._manager = built or build_manager(vllm, config, record_events=record_events)
        self._pool = self._manager.block_pool
        self._types = self._manager.coordinator.single_type_managers

    def guard(self, function: Callable[..., Any], *args: Any, **values: Any) -> Any:
        """Call into the tree. What vLLM raises on purpose is a ManagerFault, the rest a HarnessFault."""
        try:
            result = function(*args, **values)
        except (HarnessFault, ManagerFault):
            raise
        except AssertionError as error:
            raise ManagerFault("assertion", where(error)) from error
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
        real = self.guard(
            call,
            "Request",
            self._vllm.request.Request,
            eos_token_id=None,
            request_id=request.id,
            prompt_token_ids=self.tokens.ids(request.tokens.pieces),
            sampling_params=self._vllm.sampling(max_tokens=request.output_tokens),
            pooling_params=None,
            lora_request=lora,
            cache_salt=None if identity.salt is None else _word(identity.salt),
            block_hasher=self._hasher,
        )
        self.requests[request.id] = real
        return self.intern(real.block_hashes)

    def append(self, request: Request) -> tuple[int, ...]:
        """Append the tokens that the request has grown by."""
        real = self.requests[request.id]
        before = len(real.block_hashes)
        grown = request.tokens.slice(real.num_tokens, request.num_tokens)
        self.guard(real.append_output_token_ids, self.tokens.ids(grown))
        return self.intern(real.block_hashes[before:])

    def intern(self, hashes: Iterable[bytes]) -> tuple[int, ...]:
        """The keys of block hashes of a request, in order of appearance."""
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
        if hasattr(self._manager, "new_step_starts"):
            self.guard(self._manager.new_step_starts)

    def lookup(self, request: Request) -> Lookup:
        """``get_computed_blocks``."""
        return lookup_of(self.guard(self._manager.get_computed_blocks, self._sync(request)))

    def _sync(self, request: Request) -> Any:
        """What vLLM's scheduler would have written into the request by now."""
        real, status = self.requests[request.id], self._vllm.request.RequestStatus
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
            if not self.guard(manager.can_fit_full_sequence, real, **adopted):
                return None
            must_fit = False
        new = self.guard(
            call,
            "KVCacheManager.allocate_slots",
            manager.allocate_slots,
            real,
            new_tokens,
            **adopted,
            full_sequence_must_fit=must_fit,
            has_scheduled_reqs=beside,
        )
        return None if new is None else tables_of(new)

    def free(self, request: Request) -> None:
        """``free``."""
        self.guard(self._manager.free, self.requests[request.id])

    def reset(self) -> bool:
        """``reset_prefix_cache``."""
        return bool(self.guard(self._manager.reset_prefix_cache))

    def take_events(self) -> tuple[Event, ...]:
        """Events since the last call, oldest first."""
        return tuple(self._event(event) for event in self.guard(self._manager.take_events))

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
            tokens=self.tokens.pieces(event.token_ids),
            block_size=event.block_size,
            extra=None
            if (extra := getattr(event, "extra_keys", None)) is None
            else tuple(map(_words, extra)),
            lora=getattr(event, "lora_name", None),
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


def _word(text: str) -> str:
    """One object per word: pickle, which ``sha256`` hashes, shows whether two equal strings are one
    object, so without this two requests with equal names could get different hashes.
    """
    return sys.intern(text)


def _words(extra: Iterable[Any] | None) -> tuple[str, ...] | None:
    return None if extra is None else tuple(extra)


def _ids(blocks: Iterable[Any]) -> tuple[int, ...]:
    return tuple(block.block_id for block in blocks)


def tables_of(blocks: Any) -> Tables:
    """The block ids of vLLM's ``KVCacheBlocks``."""
    return tuple(map(_ids, blocks.blocks))


def lookup_of(found: Any) -> Lookup:
    """What ``get_computed_blocks`` returned."""
    if type(found[1]) is not int or found[1] < 0:
        raise HarnessFault(f"vLLM's get_computed_blocks says that the hit is {shown(found[1])} tokens")
    return Lookup(
        hit_tokens=found[1],
        blocks=tables_of(found[0]),
        junction=found[2] if len(found) > 2 else 0,
    )
