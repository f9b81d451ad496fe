"""Starting and ending the tiny server, without vLLM."""

import os
import time
from pathlib import Path

import attrs
import pytest

from hitproof.cli.main import main
from hitproof.cli.serve import DEFAULT
from hitproof.model import BadInput, CacheConfig, Group, HarnessFault, under
from hitproof.replay.counterexample import Counterexample
from hitproof.replay.serve_tiny import TinyServer, flags

PYTHON = """#!/bin/sh
[ "$1" = -c ] && echo 0.32.0 && exit
echo $$ > {folder}/pid
echo "$VLLM_SERVER_DEV_MODE" > {folder}/mode
{does}
"""


@pytest.fixture
def python(tmp_path):
    """A function that makes an interpreter with a vLLM that does ``does`` when it should serve."""

    def make(does):
        file = tmp_path / "python"
        file.write_text(PYTHON.format(folder=tmp_path, does=does))
        file.chmod(0o755)
        return file

    return make


def gone(pid):
    """Whether the process has ended within 5 s."""
    for _ in range(50):
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return True
        time.sleep(0.1)
    return False


def test_server_that_ends_while_starting(python):
    """Its exit status and its last words are the message."""
    with pytest.raises(HarnessFault, match=r"ended while starting \(exit status 7\).*\nno such model"):
        TinyServer(DEFAULT, python("echo no such model; exit 7"))


def test_pool_too_small_is_bad_input(python):
    """What the engine rung refuses is refused here, before a server starts."""
    with pytest.raises(
        BadInput, match="num_blocks 99 cannot hold one request of max_model_len 2048, which needs"
    ):
        TinyServer(attrs.evolve(DEFAULT, num_blocks=99), python("exit 7"))


def test_server_that_does_not_answer(python, tmp_path):
    """After the time limit it is ended, and nothing of it is left."""
    with pytest.raises(HarnessFault, match="does not answer after 1 s; end of its output:\nloading"):
        TinyServer(DEFAULT, python("echo loading; sleep 60"), timeout_s=1, resettable=False)
    assert gone(int((tmp_path / "pid").read_text()))
    assert (tmp_path / "mode").read_text() == "0\n"


@pytest.mark.parametrize(("status", "code", "last"), [(None, 0, "stopped\n"), (9, 3, "")])
def test_command(monkeypatch, capsys, status, code, last):
    """It says where it listens and what to type, until Ctrl-C; a server that ends by itself is a fault."""

    class Served(TinyServer):
        def __init__(self, config, python, **options):
            self.config, self.options = config, options
            self.url, self.version = "http://127.0.0.1:1", "0.32.0"
            made.append(self)

        def wait(self):
            if status is None:
                raise KeyboardInterrupt
            return status

        def close(self):
            self.closed = True

    made = []
    monkeypatch.setattr("hitproof.cli.serve.TinyServer", Served)
    monkeypatch.setattr("hitproof.replay.env.python", lambda *_: Path("python"))
    monkeypatch.setattr("hitproof.replay.env.release_of", lambda _: "0.32.0")
    monkeypatch.setattr("signal.signal", lambda *_: None)
    case = str(Path(__file__).resolve().parents[2] / "counterexamples" / "CE-0001.json")
    monkeypatch.setattr("sys.argv", ["hitproof", "serve-tiny", case, "--scale", "fit", "--no-reset"])
    with pytest.raises(SystemExit) as leave:
        main()
    assert (leave.value.code or 0) == code
    assert capsys.readouterr().out == (
        "vLLM 0.32.0 with a tiny model at http://127.0.0.1:1; Ctrl-C ends it\n"
        f"  hitproof replay {case} --scale 8 --target server --url http://127.0.0.1:1\n"
        "  hitproof probe --url http://127.0.0.1:1 --seats 4 --tokens 512\n" + last
    )
    assert made[0].closed
    assert made[0].config.groups[0].block_size == 32
    assert made[0].options["resettable"] is False


def test_flags():
    """The engine's arguments, as flags: no other settings than on the engine rung."""
    config = CacheConfig(
        num_blocks=60,
        groups=(Group(kind="sliding_window", block_size=32, window=64), Group(kind="full", block_size=32)),
        retention_interval=None,
        scheduler_reserve_full_isl=False,
    )
    words = " ".join(flags(config, "folder", "0.32.0"))
    for flag in (
        "--model folder --load-format dummy --dtype float32 --skip-tokenizer-init --enforce-eager --no-async-scheduling",
        "--num-gpu-blocks-override 60 --block-size 32",
        "--no-scheduler-reserve-full-isl",
        "--prefix-cache-retention-interval None",
    ):
        assert flag in words
    assert "retention" not in " ".join(flags(config, "folder", "0.28.0"))


def test_default_config_is_that_of_a_stored_case():
    """`serve-tiny` without a trace serves what CE-0003 can be replayed on."""
    case = Counterexample.load(Path(__file__).resolve().parents[2] / "counterexamples" / "CE-0003.json")
    assert under(case.trace, DEFAULT.semantics).config == DEFAULT
