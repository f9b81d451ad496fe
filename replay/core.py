"""The core loader: a vLLM tree's own KV-cache core files on the standard library alone.

An import hook executes the modules of ``EXECUTED`` unmodified from the tree. Everything else that
they import (torch, the rest of vLLM, other packages) becomes a ``StandIn``. While modules load, a
stand-in may be named, subscripted, subclassed and used as a decorator, which is what annotations and
class statements do. Once ``seal`` is called, touching one in any way is a HarnessFault that names it:
what may be touched is listed in ``SUPPLIED`` with the value it has and why that is faithful.
"""

from __future__ import annotations

import dataclasses
import importlib
import sys
import types
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from typing import TYPE_CHECKING, Any

import attrs

from hitproof.model import HarnessFault

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from pathlib import Path

EXECUTED = frozenset(
    {
        "vllm.distributed.kv_events",
        "vllm.envs",
        "vllm.lora.request",
        "vllm.utils",
        "vllm.utils.hashing",
        "vllm.utils.math_utils",
        "vllm.v1.core.block_pool",
        "vllm.v1.core.encoder_cache_manager",
        "vllm.v1.core.kv_cache_coordinator",
        "vllm.v1.core.kv_cache_manager",
        "vllm.v1.core.kv_cache_metrics",
        "vllm.v1.core.kv_cache_utils",
        "vllm.v1.core.sched",
        "vllm.v1.core.sched.interface",
        "vllm.v1.core.sched.output",
        "vllm.v1.core.sched.request_queue",
        "vllm.v1.core.sched.scheduler",
        "vllm.v1.core.sched.utils",
        "vllm.v1.core.single_type_kv_cache_manager",
        "vllm.v1.engine",
        "vllm.v1.hisparse.block_pool",
        "vllm.v1.kv_cache_interface",
        "vllm.v1.kv_cache_layout",
        "vllm.v1.kv_cache_spec_registry",
        "vllm.v1.metrics.cache_hit_source",
        "vllm.v1.metrics.stats",
        "vllm.v1.outputs",
        "vllm.v1.request",
        "vllm.v1.utils",
    }
)
"""Modules executed from the tree; those that a release does not have are not asked for."""

ABSENT = frozenset({"xxhash"})
"""Optional packages that the tree tries and does without."""

OURS = frozenset({"hitproof", "attr", "attrs"})


class _Logger:
    """A logger that drops every line: no result depends on what is logged."""

    def _drop(self, *_: Any, **__: Any) -> None:
        pass

    debug = info = warning = error = exception = debug_once = info_once = warning_once = _drop


class _Struct:
    """``msgspec.Struct`` as far as plain construction and attribute access go."""

    def __init_subclass__(cls, **options: Any) -> None:
        for name, value in list(vars(cls).items()):
            if name in cls.__annotations__ and isinstance(value, list | dict | set) and not value:
                # As msgspec: an empty default is a new one for each object.
                setattr(cls, name, dataclasses.field(default_factory=type(value)))
        dataclasses.dataclass(cls)


class _SamplingParams:
    """``vllm.sampling_params.SamplingParams(max_tokens=...)``: the defaults that ``Request`` and
    ``check_stop`` read.
    """

    extra_args = eos_token_id = stop_token_ids = repetition_detection = None
    logprobs = num_logprobs = prompt_logprobs = structured_outputs = None
    min_tokens = 0
    ignore_eos = False
    skip_reading_prefix_cache = False

    def __init__(self, *, max_tokens: int) -> None:
        self.max_tokens = max_tokens


def _nothing(*_: Any, **__: Any) -> None:
    return None


def _zero(_model_config: Any) -> int:
    return 0


def _first(features: Any, *_: Any, **__: Any) -> Any:
    return features


def _init_logger(_name: str) -> _Logger:
    return _Logger()


@attrs.frozen(slots=True)
class Supplied:
    """A stand-in that may be touched: its name, the releases that touch it, its value, and why."""

    name: str
    releases: str
    value: Any
    why: str


SUPPLIED = (
    Supplied("vllm.logger.init_logger", "all", _init_logger, "log lines change no result"),
    Supplied("msgspec.Struct", "all", _Struct, "events are only built and read, never encoded"),
    Supplied("msgspec.field", "all", dataclasses.field, "the same for a default or default factory"),
    Supplied(
        "torch.bfloat16", "all", "bfloat16", "a dtype is compared, and sizes pages in bytes, never blocks"
    ),
    Supplied(
        "vllm.sampling_params.SamplingParams",
        "all",
        _SamplingParams,
        "max_tokens and the defaults that are read; all else is an AttributeError",
    ),
    Supplied(
        "vllm.v1.structured_output.request.StructuredOutputRequest.from_sampling_params",
        "all",
        _nothing,
        "None is what it returns for a request without structured output",
    ),
    Supplied(
        "vllm.config.get_current_vllm_config_or_none",
        "0.23.0+",
        _nothing,
        "None is what it returns outside set_current_vllm_config",
    ),
    Supplied(
        "vllm.multimodal.MULTIMODAL_REGISTRY.get_encdec_max_encoder_len",
        "0.11.1-0.15.1",
        _zero,
        "0 is what it returns for a model that is not encoder-decoder",
    ),
    Supplied(
        "vllm.multimodal.utils.strip_covered_mm_data",
        "0.29.0+",
        _first,
        "it returns the list of media features as it is when that is empty, as it always is here",
    ),
    Supplied(
        "vllm.platforms.current_platform.register_custom_kv_cache_specs",
        "0.23.0+",
        _nothing,
        "no platform of the tree registers a spec (Platform's own method does nothing)",
    ),
)
"""Everything outside ``EXECUTED`` that the core files touch while they run."""


class StandIn:
    """Stands for something outside the core files. ``CoreLoader`` decides what may touch it."""

    __slots__ = ("_hitproof_loader", "_hitproof_name")

    def __init__(self, loader: CoreLoader, name: str) -> None:
        object.__setattr__(self, "_hitproof_loader", loader)
        object.__setattr__(self, "_hitproof_name", name)

    def __repr__(self) -> str:
        return f"<stand-in {self._hitproof_name}>"

    def __getattr__(self, name: str) -> Any:
        return self._hitproof_loader.member(self._hitproof_name, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As a decorator: what it decorates."""
        self._hitproof_loader.loading_only(f"{self._hitproof_name}(...)")
        if len(args) == 1 and not kwargs and callable(args[0]) and not isinstance(args[0], StandIn):
            return args[0]
        return StandIn(self._hitproof_loader, f"{self._hitproof_name}(...)")

    def __getitem__(self, item: object) -> StandIn:
        self._hitproof_loader.loading_only(f"{self._hitproof_name}[...]")
        return self

    def __or__(self, other: object) -> StandIn:
        self._hitproof_loader.loading_only(f"{self._hitproof_name} | ...")
        return self

    __ror__ = __or__

    def __mro_entries__(self, bases: tuple[object, ...]) -> tuple[type, ...]:
        self._hitproof_loader.loading_only(f"class ...({self._hitproof_name})")
        return ()

    def __hash__(self) -> int:
        self._hitproof_loader.loading_only(f"hash({self._hitproof_name})")
        return id(self)

    def __eq__(self, other: object) -> bool:
        self._hitproof_loader.loading_only(f"{self._hitproof_name} == ...")
        return self is other


def _never(special: str) -> Callable[..., Any]:
    def touch(self: StandIn, *_: Any) -> Any:
        raise self._hitproof_loader.fault(f"{self._hitproof_name}.{special}")

    return touch


_FORBIDDEN = """
    bool str format iter next len contains setitem delitem setattr delattr int float index
    lt le gt ge ne neg pos abs invert add radd sub rsub mul rmul truediv rtruediv floordiv rfloordiv
    mod rmod pow rpow lshift rshift and rand xor rxor matmul enter exit await
    instancecheck subclasscheck reduce_ex
"""
for _special in _FORBIDDEN.split():
    setattr(StandIn, f"__{_special}__", _never(f"__{_special}__"))


class _StandInModule(types.ModuleType):
    """A package or module that is not executed: its members are stand-ins."""

    __path__: list[str]

    def __init__(self, loader: CoreLoader, name: str) -> None:
        super().__init__(name)
        self._hitproof_loader = loader
        self.__path__ = []

    def __getattr__(self, name: str) -> Any:
        if f"{self.__name__}.{name}" in EXECUTED:
            return importlib.import_module(f"{self.__name__}.{name}")
        return self._hitproof_loader.member(self.__name__, name)


class CoreLoader(MetaPathFinder, Loader):
    """Serves every import that is not the standard library's or our own.

    ``root`` is the folder that contains ``vllm/``. ``touched`` keeps the forbidden touches, so that
    one whose HarnessFault the tree swallowed still comes to light.
    """

    def __init__(self, root: Path) -> None:
        self.root = root
        self.touched: list[str] = []
        self._sealed = False
        self._supplied = {row.name: row.value for row in SUPPLIED}

    def seal(self) -> None:
        """Loading is over: from now on only ``SUPPLIED`` may be touched."""
        self._sealed = True

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> ModuleSpec | None:
        """The tree's file for an executed module, a stand-in module for the rest."""
        top = fullname.partition(".")[0]
        if top in sys.stdlib_module_names or top in OURS or top in ABSENT:
            return None
        if fullname not in EXECUTED:
            return ModuleSpec(fullname, self, is_package=True)
        file = self.root.joinpath(*fullname.split("."))
        if file.is_dir():
            return spec_from_file_location(
                fullname, file / "__init__.py", submodule_search_locations=[str(file)]
            )
        return spec_from_file_location(fullname, file.with_suffix(".py"))

    def create_module(self, spec: ModuleSpec) -> types.ModuleType:
        """A stand-in module."""
        return _StandInModule(self, spec.name)

    def exec_module(self, module: types.ModuleType) -> None:
        """Nothing to execute in a stand-in module."""

    def member(self, owner: str, name: str) -> Any:
        """What ``owner.name`` is: a supplied value, the way to one, or a stand-in while loading."""
        full = f"{owner}.{name}"
        if full in self._supplied:
            return self._supplied[full]
        if any(known.startswith(f"{full}.") for known in self._supplied):
            return StandIn(self, full)
        if name.startswith("__") and not self._sealed:
            raise AttributeError(full)
        self.loading_only(full)
        return StandIn(self, full)

    def loading_only(self, what: str) -> None:
        """Fault unless modules are being loaded."""
        if self._sealed:
            raise self.fault(what)

    def fault(self, what: str) -> HarnessFault:
        """A forbidden touch of a stand-in."""
        self.touched.append(what)
        return HarnessFault(
            f"core loader: the tree touched {what}, which has no stand-in value; "
            "add it to SUPPLIED or EXECUTED in replay/core.py, or use the env loader"
        )


def install(root: Path) -> CoreLoader:
    """Serve ``vllm`` from ``root`` in this process from now on. One tree per process."""
    if any(name.partition(".")[0] == "vllm" for name in sys.modules):
        raise HarnessFault("core loader: a vllm is already loaded in this process")
    loader = CoreLoader(root)
    sys.dont_write_bytecode = True
    sys.meta_path.insert(0, loader)
    return loader
