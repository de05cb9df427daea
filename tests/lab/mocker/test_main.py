"""The command line."""

from __future__ import annotations

import re
import signal
import socket
import subprocess
import sys
import urllib.request

import pytest

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.__main__ import main
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.settings import COMMAND
from kvrouter.settings.read import load


def config(*arguments: str) -> MockerConfig:
    """The settings of a command line."""
    return load(COMMAND, arguments, {}).settings.config()


def test_defaults() -> None:
    """Without flags a mocker uses free ports and vLLM's block size."""
    default = config()

    assert (0, 16, 32_768) == (default.port, default.engine.block_size, default.engine.max_model_len)


def test_context_follows_the_cache() -> None:
    """A small cache has a small context, unless a flag sets it."""
    assert 160 == config("--num-blocks", "10").engine.max_model_len


def test_repeated_and_disabled() -> None:
    """Several LoRAs; no replay."""
    flags = config("--lora", "a", "--lora", "b", "--kv-replay", "none")

    assert (("a", "b"), None) == (flags.loras, flags.kv_replay)


def test_replay_buffer() -> None:
    """As large as vLLM's unless a flag sets it."""
    assert (None, 25) == (config().replay_buffer, config("--replay-buffer", "25").replay_buffer)


def test_impossible_settings(capsys: pytest.CaptureFixture[str]) -> None:
    """The process does not start, and prints the reason."""
    assert 2 == main(["--num-blocks", "10", "--max-model-len", "5000"])
    assert "kvrouter mocker: max_model_len 5000 does not fit" in capsys.readouterr().err


def test_process() -> None:
    """It logs its endpoints, serves, and ends with 0 on SIGTERM."""
    command = [sys.executable, "-m", "kvrouter.lab.mocker", "--port", "0"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        ready = process.stderr.readline()
        url = re.search(r"http://[\d.:]+", ready)
        assert url is not None, ready
        with urllib.request.urlopen(f"{url[0]}/health") as response:
            assert 200 == response.status
        process.send_signal(signal.SIGTERM)
        rest = process.stderr.read()

    assert "kv_replay=" in ready
    assert (0, "") == (process.returncode, rest)


@pytest.mark.parametrize("flags", [["--port"], ["--kv-events"]])
def test_port_in_use(flags: list[str]) -> None:
    """A port in use is a message, not a traceback."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        value = str(port) if flags == ["--port"] else f"tcp://127.0.0.1:{port}"
        command = [sys.executable, "-m", "kvrouter.lab.mocker", *flags, value]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    assert (2, 1) == (ended.returncode, ended.stderr.count("\n"))
    assert ended.stderr.startswith("kvrouter mocker: ")
    assert (
        flags != ["--port"]
        or f"cannot listen on 127.0.0.1:{port}: Address already in use (--port)" in ended.stderr
    )


def test_address_of_another_host() -> None:
    """The message names the flag that is wrong."""
    command = [sys.executable, "-m", "kvrouter.lab.mocker", "--host", "203.0.113.1", "--port", "9000"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)

    reason = "cannot listen on 203.0.113.1:9000: Cannot assign requested address (--host)"
    assert (2, f"kvrouter mocker: {reason}\n") == (ended.returncode, ended.stderr)


def test_no_blocks() -> None:
    """An engine without blocks is rejected."""
    with pytest.raises(ConfigError, match="--num-blocks '0': must be a whole number of at least 1"):
        config("--num-blocks", "0")
