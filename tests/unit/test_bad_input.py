"""Bad input: one message on standard error that says what is wrong, where and what to do; exit code 2.

A file is written as ``file`` in an empty folder, so every message starts with ``hitproof: file: ``.
"""

import copy
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from hitproof.cli import main as cli
from hitproof.model import BadInput
from hitproof.replay.counterexample import read_text, write_new

TRACE = {
    "schema": 1,
    "config": {
        "num_blocks": 50,
        "semantics": "0.32.0",
        "groups": [
            {"kind": "full", "block_size": 4},
            {"kind": "sliding_window", "block_size": 4, "window": 8},
        ],
    },
    "ops": ["submit a S:32 out=1", "drain"],
}
FORMS = "submit REQUEST SPAN... [out=N] [salt=S] [lora=NAME[@PATH]] [priority=N]; step [N]; drain; abort REQUEST; reset"
NUMBER = "is not a whole number; write an integer of at least"
NAMES = "use letters, digits, '_', '.' and '-', at most 100"
RELEASE = "not a vLLM release; write it as X.Y.Z, for example 0.33.0"
OUTSIDE = "not modelled; the model describes vLLM 0.11.1 to 0.33.0: name one of those releases"
CASE = {
    "schema": 1,
    "name": "case",
    "property": "progress",
    "status": "unconfirmed",
    "trace": TRACE,
    "finding": {
        "property_id": "progress",
        "at": 0,
        "op": 1,
        "request": "a",
        "expected": "x",
        "seen": "y",
    },
}


@pytest.fixture
def hitproof(monkeypatch, capsys, tmp_path):
    """A function that runs a command line in an empty folder: (exit code, standard error)."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HITPROOF_CACHE", str(tmp_path / "cache"))

    def run(*words):
        monkeypatch.setattr(sys, "argv", ["hitproof", *words])
        with pytest.raises(SystemExit) as leave:
            cli.main()
        shown = capsys.readouterr()
        assert shown.out == ""
        return leave.value.code, shown.err

    return run


def edited(data, path, value):
    """A copy of ``data`` with the field at ``path`` set, or taken out if ``value`` is ``...``."""
    changed = copy.deepcopy(data)
    *way, last = path.split("/")
    at = changed
    for step in way:
        at = at[int(step) if step.isdecimal() else step]
    if value is ...:
        del at[last]
    else:
        at[int(last) if last.isdecimal() else last] = value
    return changed


BLOCKS = "config: num_blocks (it counts the null block): "
RETENTION = "config: retention_interval (null means dense): "
CONFIG_FIELDS = (
    "enable_prefix_caching, groups, hash_block_size, max_model_len, max_num_batched_tokens, max_num_seqs, "
    "num_blocks, retention_interval, scheduler_reserve_full_isl, semantics, use_eagle, watermark"
)
CHUNKED = [{"kind": "chunked_local", "block_size": 4, "chunk": 16}]
FIELDS = [
    ("config/num_blocks", True, f"{BLOCKS}True {NUMBER} 2"),
    ("config/num_blocks", 50.0, f"{BLOCKS}50.0 {NUMBER} 2"),
    ("config/num_blocks", "50", f"{BLOCKS}'50' {NUMBER} 2"),
    ("config/num_blocks", None, f"{BLOCKS}None {NUMBER} 2"),
    ("config/num_blocks", -5, f"{BLOCKS}-5 is too small; it must be at least 2"),
    ("config/num_blocks", 10**12, f"{BLOCKS}1000000000000 is too large; it must be at most 10000000"),
    (
        "config/num_blocks",
        10**400,
        f"{BLOCKS}1{'0' * 47}...{'0' * 16} is too large; it must be at most 10000000",
    ),
    ("config/num_blocks", "9" * 9999, f"{BLOCKS}'{'9' * 47}...{'9' * 15}' {NUMBER} 2"),
    ("config/num_blocks", ..., "config: num_blocks is missing"),
    (
        "config/max_model_len",
        10**12,
        "config: max_model_len: 1000000000000 is too large; it must be at most 10000000",
    ),
    ("config/max_num_seqs", 0, "config: max_num_seqs: 0 is too small; it must be at least 1"),
    ("config/max_num_batched_tokens", True, f"config: max_num_batched_tokens: True {NUMBER} 1"),
    ("config/use_eagle", 1, "config: use_eagle must be true or false, not 1"),
    ("config/blocks", 50, f"config: unknown field 'blocks'; known fields: {CONFIG_FIELDS}"),
    ("config/\u202enum\u001b", 5, f"config: unknown field '\\u202enum\\x1b'; known fields: {CONFIG_FIELDS}"),
    ("config/kv_connector", "x", "config: not modelled: KV connectors; remove 'kv_connector'"),
    ("config/policy", "priority", "config: not modelled: the priority policy; remove 'policy'"),
    ("config", [], "config: must be an object with num_blocks and groups, not list"),
    ("config/groups", [], "config: groups is empty; give at least one group"),
    (
        "config/groups",
        {},
        "config: groups must be a list of objects such as {'kind': 'full', 'block_size': 16}",
    ),
    ("config/groups/0", 1, "config: groups[0] must be an object, not 1"),
    ("config/groups/0/count", 65, "config: groups[0]: more than 64 groups; lower count"),
    (
        "config/groups/1/kind",
        "mamba",
        "config: groups[1]: kind 'mamba' is not modelled yet; use one of full, sliding_window, chunked_local",
    ),
    (
        "config/groups/1/kind",
        ["full"],
        "config: groups[1]: unknown kind ['full']; use one of full, sliding_window, chunked_local",
    ),
    (
        "config/groups/0/mamba_cache_mode",
        "all",
        "config: groups[0]: not modelled: Mamba groups; remove 'mamba_cache_mode'",
    ),
    (
        "config/groups/0/heads",
        8,
        "config: groups[0]: unknown field 'heads'; known: kind, block_size, window, chunk, extra_retained_tokens, count",
    ),
    ("config/groups/0/block_size", True, f"config: groups[0]: block_size of the full group: True {NUMBER} 1"),
    ("config/groups/0/window", 8, "config: groups[0]: a full group has no 'window'; remove it"),
    ("config/groups/1/window", ..., "config: groups[1]: a sliding_window group needs 'window' (in tokens)"),
    (
        "config/groups/1/window",
        10**18,
        "config: groups[1]: window of the sliding_window group: 1000000000000000000 is too large; it must be at most 1000000000",
    ),
    ("config/semantics", "latest", f"config: semantics 'latest': {RELEASE}"),
    ("config/semantics", "0.25.0rc1", f"config: semantics '0.25.0rc1': {RELEASE}"),
    ("config/semantics", "0.\u0662\u0665.0", f"config: semantics '0.\u0662\u0665.0': {RELEASE}"),
    ("config/semantics", "1.0.0", f"config: semantics '1.0.0': {OUTSIDE}"),
    ("config/semantics", "0.11.0", f"config: semantics '0.11.0': {OUTSIDE}"),
    ("config/semantics", 0.25, "config: semantics must be a release such as '0.33.0', not 0.25"),
    (
        "config/retention_interval",
        5,
        "config: retention_interval 5 must be a multiple of the scheduler block size (4)",
    ),
    ("config/retention_interval", False, f"{RETENTION}False {NUMBER} 0"),
    ("config/retention_interval", -4, f"{RETENTION}-4 is too small; it must be at least 0"),
    ("config/watermark", float("nan"), "config: watermark nan must be in [0, 1)"),
    ("config/watermark", -0.1, "config: watermark -0.1 must be in [0, 1)"),
    ("config/watermark", "0.1", "config: watermark must be a number in [0, 1), not '0.1'"),
    ("config/hash_block_size", 3, "config: hash_block_size 3 must divide every group's block_size ([4])"),
    ("schema", 2, "trace: schema 2 is not known: this version reads 1; use the hitproof that wrote the file"),
    (
        "schema",
        True,
        "trace: schema True is not known: this version reads 1; use the hitproof that wrote the file",
    ),
    ("schema", ..., "trace: schema is missing; this version writes 1"),
    ("extra", 1, "trace: unknown field 'extra'; known fields: schema, config, ops, note"),
    ("note", 3, "trace: note must be text"),
    ("ops", [], "trace: ops is empty; give at least one op"),
    ("ops", "drain", "trace: ops must be a list of lines such as 'submit r1 S:64 out=1'"),
    ("ops", ["drain"] * 100_001, "trace: 100001 ops; the most is 100000"),
    (
        "config",
        {"num_blocks": 9, "groups": CHUNKED, "use_eagle": True},
        "config: vLLM refuses EAGLE with chunked local attention; set use_eagle to false",
    ),
    (
        "config",
        {"num_blocks": 9, "groups": [*CHUNKED, {"kind": "full", "block_size": 8}]},
        "config: vLLM refuses chunked local attention whose block_size is not the scheduler block size (8); "
        "give all groups one block size",
    ),
    (
        "config",
        {**TRACE["config"], "semantics": "0.22.0", "retention_interval": 4},
        "config: retention_interval needs vLLM 0.23.0 or newer, not 0.22.0; set it to null",
    ),
    (
        "config",
        {**TRACE["config"], "semantics": "0.23.0", "watermark": 0.1},
        "config: watermark needs vLLM 0.24.0 or newer, not 0.23.0",
    ),
]


@pytest.mark.parametrize(("path", "value", "message"), FIELDS)
def test_field_of_a_trace(hitproof, path, value, message):
    """A wrong field is named with its place and its value, whatever that is."""
    Path("file").write_text(json.dumps(edited(TRACE, path, value)))
    assert hitproof("run", "file") == (2, f"hitproof: file: {message}\n")


STEPS = "write a whole number from 1 to 100000"
SPANS = "write STREAM:LENGTH, STREAM[START:STOP] or @REQUEST"
OPS = [
    ("", f"empty op; write one of: {FORMS}"),
    ("\u001b[31mdrain", f"op '\\x1b[31mdrain': not understood; write one of: {FORMS}"),
    ("drain now", f"op 'drain now': not understood; write one of: {FORMS}"),
    ("x" * 100_000, f"op '{'x' * 47}...{'x' * 15}': not understood; write one of: {FORMS}"),
    ("step 0", f"step '0': {STEPS}"),
    ("step -1", f"step '-1': {STEPS}"),
    ("step 1e3", f"step '1e3': {STEPS}"),
    ("step \u0663", f"step '\u0663': {STEPS}"),
    ("step 999999999", f"step '999999999': {STEPS}"),
    ("step " + "9" * 5000, f"step '{'9' * 47}...{'9' * 15}': {STEPS}"),
    ("submit", f"submit without a request name; write: {FORMS.partition(';')[0]}"),
    ("submit a", "submit a: no prompt; give at least one span such as S:64"),
    ("submit a S", f"span 'S': {SPANS}"),
    ("submit a S:1.5", f"span 'S:1.5': {SPANS}"),
    ("submit a \u00e9:4", f"span '\u00e9:4': {SPANS}"),
    ("submit a S:" + "9" * 5000, f"span 'S:{'9' * 45}...{'9' * 15}': {SPANS}"),
    ("submit a S:0", "span 'S:0': it has no tokens; make its length at least 1"),
    ("submit a S[5:3]", "span 'S[5:3]': it has no tokens; make its length at least 1"),
    ("submit a @b", "@b: no such request before it; submit it first"),
    ("submit a S:4 out=0", "out '0': write a whole number from 1 to 999999999"),
    ("submit a S:4 out=1 out=1", "submit a: out is given twice"),
    ("submit a S:4 size=1", "submit a: unknown setting 'size'; use out, salt, lora or priority"),
    ("submit a S:4 salt=", f"salt '': {NAMES}"),
    ("submit a S:4 lora=x@", f"lora path '': {NAMES}"),
    ("submit " + "a" * 101 + " S:4", f"request '{'a' * 47}...{'a' * 15}': {NAMES}"),
    (
        "submit a S:999999999999",
        "request a has 999999999999 prompt + 1 output tokens, more than max_model_len 2048; "
        "shorten it or raise max_model_len",
    ),
    ("abort b", "abort b: no such request before it; submit it first"),
]


@pytest.mark.parametrize(("line", "message"), OPS)
def test_op(hitproof, line, message):
    """A wrong op or span is quoted with the index of its line."""
    Path("file").write_text(json.dumps({**TRACE, "ops": [line, "drain"]}))
    assert hitproof("run", "file") == (2, f"hitproof: file: trace: ops[0]: {message}\n")


DEEP = "not a file of hitproof: it is nested too deeply to be read"
FILES = [
    (b"", "trace: the file is empty; give a JSON file"),
    (b" \n", "trace: the file is empty; give a JSON file"),
    (bytes(range(256)), "not text: byte 128 is not UTF-8; give a trace or counterexample file"),
    (
        json.dumps(TRACE).encode("utf-16"),
        "not text: byte 0 is not UTF-8; give a trace or counterexample file",
    ),
    (
        b"{'schema': 1}",
        "trace: not JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    ),
    (b'{"schema": 1', "trace: not JSON: Expecting ',' delimiter: line 1 column 13 (char 12)"),
    (b"{}{}", "trace: not JSON: Extra data: line 1 column 3 (char 2)"),
    (b"[" * 100_000, f"trace: {DEEP}"),
    (b'{"config":' * 100_000, f"trace: {DEEP}"),
    (
        b'{"schema": ' + b"1" * 5000 + b"}",
        "trace: not a file of hitproof: it has a number of more than 4300 digits",
    ),
    (b'{"schema": 1, "config": {"a": 1, "a": 2}}', "trace: field 'a' is given twice; keep one"),
    (b'{"note": "\\ud800"}', "trace: its text has half a character (a lone \\ud800 to \\udfff); remove it"),
    (b"null", "trace: must be an object with schema, config and ops, not NoneType"),
    (b"NaN", "trace: must be an object with schema, config and ops, not float"),
]


@pytest.mark.parametrize(("content", "message"), FILES)
def test_file_that_is_no_trace(hitproof, content, message):
    """What is not JSON text, or not of a trace, is refused before anything is looked at."""
    Path("file").write_bytes(content)
    assert hitproof("run", "file") == (2, f"hitproof: file: {message}\n")


CASES = [
    (
        "finding",
        ...,
        "not a counterexample file: it needs 'trace' and 'finding'; a trace alone is for `hitproof run`",
    ),
    ("schema", 2, "schema 2 is not known: this version reads 1; use the hitproof that wrote the file"),
    ("name", 5, "name must be text, not 5"),
    ("name", ..., "name is missing"),
    (
        "status",
        "good",
        "case: status 'good' is not one of unconfirmed, confirmed, model wrong, property wrong, harness wrong",
    ),
    ("property", "nope", "property is 'nope', but the finding's is 'progress'"),
    ("finding", "x", "finding must be an object, not 'x'"),
    ("finding/at", True, "finding: at must be a whole number, not True"),
    ("finding/op", 9, "finding: op 9 at 0: the trace has ops 0 to 1"),
    ("finding/request", "b", "finding: request 'b' is not in the trace"),
    ("finding/request", 1, "finding: request must be text or null, not 1"),
    ("finding/cause", "magic", "finding: cause 'magic' is not one of evicted, not written, all cached"),
    ("finding/reasons", ["x", 1], "finding: reasons: must be a list of texts"),
    (
        "sightings",
        [{"tree": "x"}],
        "sightings[0]: unknown field 'tree'; known fields: target, version, verdict, detail",
    ),
    ("sightings", None, "sightings must be a list, not None"),
    ("trace", [], "trace must be an object, not []"),
    ("trace/ops", ["stop"], f"trace: ops[0]: op 'stop': not understood; write one of: {FORMS}"),
]


@pytest.mark.parametrize("command", ["replay", "report"])
@pytest.mark.parametrize(("path", "value", "message"), CASES)
def test_field_of_a_counterexample(hitproof, command, path, value, message):
    """A counterexample file is checked as strictly as the trace in it."""
    Path("file").write_text(json.dumps(edited(CASE, path, value)))
    assert hitproof(command, "file") == (2, f"hitproof: file: {message}\n")


def test_good_files_are_read(monkeypatch, tmp_path, capsys):
    """The files that all others here are made from have nothing wrong with them."""
    (tmp_path / "trace").write_text("\ufeff" + json.dumps(TRACE))
    (tmp_path / "case").write_text(json.dumps(CASE))
    for file in ("trace", "case"):
        monkeypatch.setattr(sys, "argv", ["hitproof", "run", str(tmp_path / file), "--json"])
        with pytest.raises(SystemExit) as leave:
            cli.main()
        assert leave.value.code == 0
        assert json.loads(capsys.readouterr().out)["requests"][0]["finished"]


HUNT = "see `hitproof hunt --help`"
TREE = "give a release such as 0.25.0 or the folder of a vLLM source tree"
READ = "give a trace or counterexample file"
WRITE = "choose a folder that can be written"
BUDGET = f"write seconds or minutes, for example 60s or 5m; {HUNT}"
COMMANDS = [
    ("run .", f": .: cannot read it: Is a directory; {READ}"),
    ("run missing", f": missing: cannot read it: No such file or directory; {READ}"),
    ("run /dev/zero", f": /dev/zero: more than 256 MiB; {READ}"),
    ("run", " run: Missing argument 'TRACE'; see `hitproof run --help`"),
    ("run trace --vllm nonsense", f": semantics 'nonsense': {RELEASE}"),
    ("run trace --vllm 1.0.0", f": semantics '1.0.0': {OUTSIDE}"),
    ("run trace --target manager --vllm nonsense", f": nonsense: no such folder; {TREE}"),
    (
        "run trace --target manager --vllm .",
        ": .: not a vLLM source tree: it has no vllm/v1/core/kv_cache_manager.py",
    ),
    ("run trace --target manager --vllm ~nobody-here", f": ~nobody-here: no such folder; {TREE}"),
    ("run trace --target manager --vllm 0.11.0", f": semantics '0.11.0': {OUTSIDE}"),
    (
        "run trace --target engine --vllm-python nope",
        ": --vllm-python nope: not an interpreter; give the path of a python with vLLM",
    ),
    (
        "run trace --vllm-python python",
        ": --vllm-python: for a real vLLM, not for --target model; remove it",
    ),
    ("run trace --device cuda", ": --device cuda: for --target engine only, not model; remove it"),
    (
        "replay trace --scale 0",
        " replay: Invalid value for --scale: '0': write fit or a number from 1 to 1024; see `hitproof replay --help`",
    ),
    (
        "bisect trace",
        ": trace: not a counterexample; name the promise to judge with --property",
    ),
    (
        "hunt --unlike 0.33",
        ": --unlike 0.33: a release keeps and breaks what it does itself; name another one",
    ),
    ("check 0.32.0 --markdown .", ": .: it is a folder; name a file"),
    (
        "bisect trace --property progress --keep",
        ": --keep: for a counterexample file as it is, without --property and --retention",
    ),
    ("bisect trace --property progress --good 0.10.0", f": semantics '0.10.0': {OUTSIDE}"),
    (
        "bisect trace --property progress --retention x",
        " bisect: Invalid value for --retention: 'x': write dense or a number of tokens; see `hitproof bisect --help`",
    ),
    ("check nowhere", f": nowhere: no such folder; {TREE}"),
    ("check 0.11.0", f": semantics '0.11.0': {OUTSIDE}"),
    (
        "check 0.32.0 --semantics 0.31.0",
        ": --semantics 0.31.0: for a source tree only; release 0.32.0 has its own rules",
    ),
    ("hunt --unlike-retention 0", ": --unlike-retention: needs --unlike, the release to set it in"),
    ("hunt --unlike 0.11.0", f": semantics '0.11.0': {OUTSIDE}"),
    (
        "conform --traces 5 --steps 5",
        " conform: --traces and --steps: give one of the two; see `hitproof conform --help`",
    ),
    ("replay trace --target server", ": --target server: which one? Give --url, as http://127.0.0.1:8000"),
    ("replay trace --target server --url nonsense", ": --url 'nonsense': write it as http://127.0.0.1:8000"),
    (
        "replay trace --target server --url http://127.0.0.1:9 --vllm 0.32.0",
        ": --vllm: a server says which vLLM it is; remove it",
    ),
    (
        "replay trace --target server --url http://127.0.0.1:9",
        ": http://127.0.0.1:9: no server answers: [Errno 111] Connection refused; start one, for example `hitproof serve-tiny`",
    ),
    ("replay trace --url http://127.0.0.1:9", ": --url: for --target server only, not manager; remove it"),
    ("hunt --semantics 0.11.0", f": semantics '0.11.0': {OUTSIDE}"),
    ("hunt --budget 0", f" hunt: Invalid value for --budget: '0': {BUDGET}"),
    ("hunt --budget nan", f" hunt: Invalid value for --budget: 'nan': {BUDGET}"),
    ("hunt --budget -5s", f" hunt: Invalid value for --budget: '-5s': {BUDGET}"),
    ("hunt --budget 1e3", f" hunt: Invalid value for --budget: '1e3': {BUDGET}"),
    ("hunt --workers 0", f" hunt: Invalid value for '--workers': 0 is not in the range 1<=x<=64; {HUNT}"),
    (
        "hunt --retention some",
        f" hunt: Invalid value for --retention: 'some': write default, any, dense or a number of tokens; {HUNT}",
    ),
    (
        "hunt --retention 64 --semantics 0.22.0",
        ": --retention 64: needs vLLM 0.23.0 or newer, not 0.22.0; remove it or name other releases with --semantics",
    ),
    ("hunt --out trace", f": trace: cannot write there: Not a directory; {WRITE}"),
    ("hunt --out trace/in/it", f": trace/in/it: cannot write there: Not a directory; {WRITE}"),
    ("hunt --nothing", f" hunt: No such option '--nothing'; {HUNT}"),
    ("conform --release nope", f": nope: no such folder; {TREE}"),
    ("vllm add nonsense", f": nonsense: no such folder; {TREE}"),
    (
        "vllm add 0.25.0 --semantics 0.24.0",
        ": --semantics 0.24.0: for a source tree only; release 0.25.0 has its own rules",
    ),
    ("vllm env 0.99.0", f": semantics '0.99.0': {OUTSIDE}"),
    ("docs verdicts --release nope", f": semantics 'nope': {RELEASE}"),
    (
        "scenario round-robin --retention 33",
        ": config: retention_interval 33 must be a multiple of the scheduler block size (32)",
    ),
    ("scenario round-robin --full-groups 63", ": config: 68 groups; the most is 64"),
    (
        "scenario round-robin --seats 999 --rounds 999",
        ": --seats 999 --rounds 999: 1996002 ops; the most is 100000",
    ),
    (
        "scenario round-robin -o trace",
        ": trace: exists already and is never overwritten; move it away or choose another folder",
    ),
    ("scenario round-robin -o trace/x", f": trace/x: cannot write it: its folder is a file; {WRITE}"),
    ("scenario round-robin -o .", ": .: not the name of a file; name one"),
    ("nonsense", ": No such command 'nonsense'; see `hitproof --help`"),
]


@pytest.mark.parametrize(("line", "message"), COMMANDS)
def test_command(hitproof, line, message):
    """A command that cannot be run as written says so and leaves the folder as it was."""
    Path("trace").write_text(json.dumps(TRACE))
    assert hitproof(*line.split()) == (2, f"hitproof{message}\n")
    assert os.listdir() == ["trace"]


@pytest.mark.parametrize("line", ["hunt --property nope", "properties nope"])
def test_unknown_property_lists_all(hitproof, line):
    """The message for a property that does not exist names those that do."""
    code, message = hitproof(*line.split())
    assert code == 2
    assert message.startswith("hitproof: property 'nope': no such property; known: hit-survives-half-pool, ")
    assert message.endswith(", events-self-consistent\n")


def test_cache_folder_that_is_a_file(hitproof, monkeypatch):
    """A cache folder that cannot be made says which variable to set."""
    Path("trace").write_text(json.dumps(TRACE))
    Path("cache").write_text("")
    monkeypatch.setattr("hitproof.replay.store._pip", pytest.fail)
    place = Path("cache/trees/0.32.0").absolute()
    message = f"{place}: cannot use the cache: Not a directory; set HITPROOF_CACHE to a folder you own"
    assert hitproof("run", "trace", "--target", "manager") == (2, f"hitproof: {message}\n")


def test_cache_folder_of_nobody(hitproof, monkeypatch):
    """A user without a home folder is not given a folder called ``~``."""
    monkeypatch.setenv("HITPROOF_CACHE", "~nobody-here/cache")
    message = "~nobody-here/cache: this user has no home folder; set HITPROOF_CACHE to a folder you own"
    assert hitproof("vllm", "list") == (2, f"hitproof: {message}\n")
    assert os.listdir() == []


def test_file_is_never_overwritten_nor_half_written(tmp_path):
    """A second write changes nothing, and no part of either is left beside the file."""
    write_new(tmp_path / "new" / "file", "first")
    with pytest.raises(BadInput, match="exists already and is never overwritten"):
        write_new(tmp_path / "new" / "file", "second")
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["file"]
    assert read_text(tmp_path / "new" / "file") == "first"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["run", "file"],
            f"hitproof: file: config: {BLOCKS.removeprefix('config: ')}1000000000000 is too large; "
            "it must be at most 10000000\n",
        ),
        (["hunt", "--semantics", "0.11.0"], f"hitproof: semantics '0.11.0': {OUTSIDE}\n"),
        (
            ["run", "--vllm"],
            "hitproof: Option '--vllm' requires an argument; see `hitproof --help`\n",
        ),
    ],
)
def test_true_process(tmp_path, words, message):
    """The installed command itself: exit code, and nothing but the message."""
    (tmp_path / "file").write_text(json.dumps(edited(TRACE, "config/num_blocks", 10**12)))
    done = subprocess.run(
        [Path(sys.executable).with_name("hitproof"), *words], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout, done.stderr) == (2, "", message)
