"""Logs on stderr. Tests start processes, as logging is global."""

from __future__ import annotations

import json
import subprocess
import sys
from functools import cache

import pytest

from kvrouter.telemetry.logs import MAX_LINES

WRITE_LOGS = """
import logging, structlog
from kvrouter.telemetry.logs import set_up_logs
log = structlog.get_logger()
set_up_logs({level!r}, {form!r})
log.debug("worker.seen", worker="w0")
log.info("worker.joined", worker="w1")
log.warning("worker.lost", worker="w2", silent_s=31)
try:
    1 / 0
except ZeroDivisionError:
    log.exception("feed.error", subject="s")
logging.getLogger("nats.aio.client").error("noise")
logging.getLogger("some.library").warning("library warns")
logging.getLogger("some.library").info("library details")
"""


@cache
def logged(level: str, form: str) -> list[str]:
    """The lines that a process with these settings logs; stdout stays empty. Tests share the process."""
    code = WRITE_LOGS.format(level=level, form=form)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "" == done.stdout
    return done.stderr.splitlines()


def test_json() -> None:
    """`json`: one object per line with event, fields, level and time."""
    lines = [json.loads(line) for line in logged("info", "json")]
    lost = lines[1]

    assert ["worker.joined", "worker.lost", "feed.error", "library.logged"] == [
        line["event"] for line in lines
    ]
    assert ("warning", "w2", 31) == (lost["level"], lost["worker"], lost["silent_s"])
    assert lost["timestamp"].endswith("Z")


def test_no_password() -> None:
    """Users and passwords of URLs are not logged, whatever field has them."""
    code = (
        "import structlog\nfrom kvrouter.telemetry.logs import set_up_logs\nset_up_logs()\n"
        "structlog.get_logger().info('engine.awaited', url='http://u:secret@h:1', error='at http://u:secret@h')"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert "url=http://h:1 error='at http://h'" in done.stderr
    assert "secret" not in done.stderr


def test_json_has_tracebacks() -> None:
    """An exception is one object, with its traceback."""
    failure = next(json.loads(line) for line in logged("error", "json") if line.startswith("{"))

    assert "ZeroDivisionError" in failure["exception"]


def test_console() -> None:
    """`console`: readable lines, without colours if stderr is not a terminal."""
    lines = logged("info", "console")

    assert any("worker.lost" in line and "worker=w2" in line and "silent_s=31" in line for line in lines)
    assert not any("\x1b" in line for line in lines)


@pytest.mark.parametrize(("level", "count"), [("debug", 3), ("info", 2), ("warning", 1), ("error", 0)])
def test_levels(level: str, count: int) -> None:
    """Events below the level are not logged."""
    assert count == len([line for line in logged(level, "json") if '"event": "worker.' in line])


def test_libraries() -> None:
    """Warnings of libraries are logged, except of nats-py: the bus logs the same events once."""
    lines = logged("info", "console")

    assert "some.library: library warns" in lines
    assert not any("details" in line or "noise" in line for line in lines)


CRASH = """
import logging
from kvrouter.telemetry.logs import set_up_logs
set_up_logs("info", "json")
try:
    1 / 0
except ZeroDivisionError:
    logging.getLogger("asyncio").exception("Task failed\\n%s", "twice")
raise KeyError("x")
"""


def test_all_of_json_is_json() -> None:
    """What libraries log, tracebacks and all, and the end by an exception are events as well."""
    done = subprocess.run([sys.executable, "-c", CRASH], capture_output=True, text=True, check=False)
    library, crash = map(json.loads, done.stderr.splitlines())

    assert ("library.logged", "asyncio", "error") == (library["event"], library["logger"], library["level"])
    assert "Task failed\ntwice" == library["message"]
    assert "ZeroDivisionError" in library["exception"]
    assert ("process.crashed", "critical") == (crash["event"], crash["level"])
    assert "KeyError" in crash["exception"]
    assert 1 == done.returncode


FLOOD = """
import sys, structlog
from kvrouter.telemetry.logs import set_up_logs
set_up_logs("info", "json")
for number in range({count}):
    structlog.get_logger().info("worker.joined", number=number, pad="x" * 500)
print("done", flush=True)
sys.stdin.readline()
structlog.get_logger().info("worker.lost")
"""


def test_full_disk() -> None:
    """Lines that cannot be written are lost; the process continues."""
    with open("/dev/full", "wb") as full:
        command = [sys.executable, "-c", FLOOD.format(count=100)]
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=full, text=True, check=True
        )

    assert "done\n" == done.stdout


@pytest.mark.parametrize("form", ["json", "console"])
def test_no_stderr(form: str) -> None:
    """A process that was started without stderr runs, and logs nowhere."""
    command = ["sh", "-c", '"$0" -c "$1" 2>&-', sys.executable, WRITE_LOGS.format(level="info", form=form)]
    subprocess.run(command, check=True)


def test_blocked_pipe() -> None:
    """A pipe that is not read blocks no caller; once it is read, it reports the number of lost lines."""
    count = MAX_LINES + 5_000
    command = [sys.executable, "-c", FLOOD.format(count=count)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None
        assert process.stdout is not None
        assert process.stderr is not None
        assert "done\n" == process.stdout.readline()
        lines = [process.stderr.readline() for _ in range(MAX_LINES)]
        process.stdin.write("go on\n")
        process.stdin.flush()
        lines += process.stderr.readlines()

    lost = [json.loads(line)["lines"] for line in lines if '"log.lost"' in line]
    assert "worker.lost" in lines[-1]
    assert (0, count + 1) == (process.returncode, len(lines) - len(lost) + sum(lost))
