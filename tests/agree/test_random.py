"""The model against vLLM's own manager on random traces, call by call.

HITPROOF_AGREE_TRACES is the number of traces per release (default 60), HITPROOF_AGREE_SEED the first
seed (default 0). A difference prints the trace as a file that ``Trace.loads`` reads.
"""

import os
from collections import Counter

import pytest

from hitproof.fuzz.random_traces import coverage, random_trace

pytestmark = pytest.mark.vllm

TRACES = int(os.environ.get("HITPROOF_AGREE_TRACES", "60"))
SEED = int(os.environ.get("HITPROOF_AGREE_SEED", "0"))


def test_no_random_trace_tells_the_model_from_vllm(target):
    """Every result, event and state of every call is equal, over configs and traces of all kinds."""
    traces = [random_trace(seed, target.tree.semantics) for seed in range(SEED, SEED + TRACES)]
    found = target.conform(traces)
    for trace, result in zip(traces, found, strict=True):
        assert result.divergence is None, f"{result.divergence}\n{trace.dumps()}"
    calls = sum(result.calls for result in found)
    print(f"vLLM {target.version}: {len(traces)} traces, {calls} calls, no difference")
    assert calls > 20 * TRACES


def test_random_traces_cover_what_they_claim():
    """Sixty traces of the newest release cover every kind of group, setting and op at least once."""
    seen = Counter(word for seed in range(60) for word in coverage(random_trace(seed, "0.33.0")))
    wanted = {
        "full",
        "sliding_window",
        "chunked_local",
        "unequal block sizes",
        "several groups",
        "EAGLE",
        "abort",
    }
    wanted |= {"watermark", "caching off", "dense", "retention 0", "retention N", "reset", "salt or LoRA"}
    assert wanted <= set(seen), wanted - set(seen)
