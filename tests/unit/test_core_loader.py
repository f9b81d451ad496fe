"""Stand-ins of the core loader: lenient while modules load, never afterwards."""

from pathlib import Path

import pytest

from hitproof.model import HarnessFault
from hitproof.replay.core import EXECUTED, SUPPLIED, CoreLoader, StandIn

TOUCHES = {
    "torch.Tensor": lambda torch: torch.Tensor,
    r"torch\(\.\.\.\)": lambda torch: torch(),
    "torch.__bool__": bool,
    "torch.__iter__": list,
    "torch.__len__": len,
    "torch.__str__": str,
    "torch.__format__": lambda torch: f"{torch}",
    "torch.__add__": lambda torch: torch + 1,
    "torch.__radd__": lambda torch: 1 + torch,
    "torch.__lt__": lambda torch: torch < 1,
    "torch == ": lambda torch: torch == 1,
    r"hash\(torch\)": lambda torch: {torch},
    r"torch\[\.\.\.\]": lambda torch: torch[0],
    r"torch \| ": lambda torch: None | torch,
    "torch.__contains__": lambda torch: 1 in torch,
    "torch.__index__": lambda torch: range(torch),
    "torch.__instancecheck__": lambda torch: isinstance(1, torch),
    "torch.__setattr__": lambda torch: setattr(torch, "x", 1),
}


@pytest.fixture
def loader():
    return CoreLoader(Path("nowhere"))


@pytest.mark.parametrize("what", TOUCHES)
def test_touch_after_loading_names_the_stand_in(loader, what):
    """Whatever is done with a stand-in at run time, the fault says which one it was."""
    torch = StandIn(loader, "torch")
    loader.seal()
    with pytest.raises(HarnessFault, match=f"the tree touched {what}"):
        TOUCHES[what](torch)
    assert len(loader.touched) == 1


def test_annotations_bases_and_decorators_load(loader):
    """While modules load, a stand-in can be what class statements and annotations need."""
    torch = StandIn(loader, "torch")

    @torch.compile
    def function(x: list[torch.Tensor] | torch.dtype | None) -> torch.nn.Module["int"]:
        return x

    class Module(torch.nn.Module):
        pass

    assert function(3) == 3
    assert Module.__bases__ == (object,)
    assert loader.touched == []


def test_values_are_refused_even_while_loading(loader):
    """A stand-in is never a truth value, a number or a sequence, so no module loads wrongly."""
    for touch in (bool, list, len, int, lambda torch: torch > 1):
        with pytest.raises(HarnessFault):
            touch(StandIn(loader, "torch"))


def test_supplied_values_are_reached_through_their_parents(loader):
    """A supplied name is its value before and after loading; its neighbours are not."""
    loader.seal()
    assert loader.member("vllm.config", "get_current_vllm_config_or_none")() is None
    platform = loader.member("vllm.platforms", "current_platform")
    assert platform.register_custom_kv_cache_specs(None) is None
    with pytest.raises(HarnessFault, match=r"platforms\.current_platform\.is_cuda"):
        platform.is_cuda()


def test_every_supplied_value_says_why():
    """No row of the allow-list lacks its reason, and none shadows an executed module."""
    for row in SUPPLIED:
        assert row.why
        assert row.releases
        assert row.name not in EXECUTED


def test_standard_library_and_our_own_modules_are_left_alone(loader):
    """The loader finds nothing for them, nor for packages that the tree can do without."""
    for name in ("json", "hitproof.model", "attrs", "xxhash"):
        assert loader.find_spec(name, None) is None
    assert loader.find_spec("torch", None) is not None
