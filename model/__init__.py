"""The abstract state machine of vLLM's hybrid KV-cache manager, and the words of a trace."""

from hitproof.model.config import CacheConfig
from hitproof.model.content import Identity, KeyTable, Span, Tokens, common_prefix
from hitproof.model.errors import BadInput, HarnessFault, HitproofError, ManagerFault, NotModelled, shown
from hitproof.model.groups import Group, cdiv
from hitproof.model.manager import Manager, ModelManager
from hitproof.model.observation import UNSEEN, Lookup, Observation, RequestResult, Run, Snapshot, Unseen
from hitproof.model.ops import Abort, Drain, Op, Reset, Step, Submit, parse_op
from hitproof.model.pool import NO_KEY, NULL, BlockPool, Event
from hitproof.model.reading import read_json
from hitproof.model.request import Request
from hitproof.model.scheduler import Scheduler
from hitproof.model.semantics import NEWEST, RELEASES, Semantics, switch_table
from hitproof.model.target import ModelTarget, Target, under
from hitproof.model.trace import Trace, resolve

__all__ = [
    "NEWEST",
    "NO_KEY",
    "NULL",
    "RELEASES",
    "UNSEEN",
    "Abort",
    "BadInput",
    "BlockPool",
    "CacheConfig",
    "Drain",
    "Event",
    "Group",
    "HarnessFault",
    "HitproofError",
    "Identity",
    "KeyTable",
    "Lookup",
    "Manager",
    "ManagerFault",
    "ModelManager",
    "ModelTarget",
    "NotModelled",
    "Observation",
    "Op",
    "Request",
    "RequestResult",
    "Reset",
    "Run",
    "Scheduler",
    "Semantics",
    "Snapshot",
    "Span",
    "Step",
    "Submit",
    "Target",
    "Tokens",
    "Trace",
    "Unseen",
    "cdiv",
    "common_prefix",
    "parse_op",
    "read_json",
    "resolve",
    "shown",
    "switch_table",
    "under",
]
