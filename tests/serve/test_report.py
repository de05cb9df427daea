"""What `kvrouter serve` says itself."""

from __future__ import annotations

import contextlib
import io
import shlex

from kvrouter.processes.output import Output
from kvrouter.serve.report import MOST_WARNINGS, Ready, Voice, curl, report
from kvrouter.serve.tokenizers import TokenizerReport
from kvrouter.worker.engines.facts import EngineFacts
from kvrouter.worker.engines.http import Models
from kvrouter.worker.engines.metrics import Scrape
from kvrouter.worker.engines.vllm import EVENTS_OFF
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.zmq.sockets import EventEndpoints

OPTIONS = AgentOptions("http://e:1", "e-1")


def test_everything_found() -> None:
    """The report lists everything that was found."""
    facts = EngineFacts(
        Models(("tiny", "alias"), ("a",)),
        "0.32.0",
        Scrape(block_size=32, device_blocks=1000, host_blocks=50),
        ranks=2,
        endpoints=(EventEndpoints("tcp://e:2", "tcp://e:4"), EventEndpoints("tcp://e:3", "tcp://e:5")),
        tokenizer="/models/tiny",
    )

    assert """\
engine e-1 at http://e:1: vllm 0.32.0
  model       tiny, alias, LoRA: a
  block size  32 tokens
  blocks      1,000 (32,000 tokens), 50 in host memory
  ranks       2
  events      tcp://e:2, tcp://e:3
  replay      tcp://e:4, tcp://e:5
  tokenizer   /models/tiny""" == "\n".join(report(OPTIONS, facts, TokenizerReport("/models/tiny")).lines())


def test_role() -> None:
    """Half of a pair has a line with its role and connector."""
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), role="prefill", kv_connector="nixl")

    assert "  role        prefill, connector nixl" in report(OPTIONS, facts, TokenizerReport("")).lines()


def test_much_missing() -> None:
    """Each missing item is reported with its remedy."""
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), tokenizer="Org/Model", lacks=(EVENTS_OFF,))

    lines = list(report(OPTIONS, facts, TokenizerReport("none", "no tokenizer: why")).lines())

    assert "  blocks      unknown" in lines
    assert "  events      none: placed by load" in lines
    assert f"  ! {EVENTS_OFF}" in lines
    assert "  ! no tokenizer: why" == lines[-1]


def test_events_not_used() -> None:
    """Events that the frontends do not use are reported as unused, with the reason."""
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), endpoints=(EventEndpoints("tcp://e:2"),))

    lines = list(
        report(OPTIONS, facts, TokenizerReport("none: by text"), no_events="--tokenizer none").lines()
    )

    assert "  events      tcp://e:2 (not used: --tokenizer none)" in lines
    assert "  tokenizer   none: by text" == lines[-1]


READY = Ready("http://h:1", "http://h:2", ("m",), 1, 2, "kv by KV events", "curl http://h:1/v1/completions")


def said_by(*lines: bytes) -> list[str]:
    """What is printed for these lines of a child process and the line at the end of the start."""
    out = io.BytesIO()
    voice = Voice(is_json=False)
    output = Output(out, io.BytesIO(), width=5, on_line=voice.hear)
    voice.speak_to(output)
    with contextlib.closing(output):
        for line in lines:
            output.line("child", line)
        voice.ready(READY)
    return out.getvalue().decode().splitlines()[len(lines) :]


def test_ready() -> None:
    """The last line of the start has what a new user needs."""
    assert [
        "serve | ready: http://h:1 (m, 1 of 2 workers, kv by KV events) · admin http://h:2 · "
        "try: curl http://h:1/v1/completions"
    ] == said_by()


def test_warnings_are_repeated() -> None:
    """Warnings of child processes come again before the last line, each once, without time and colours.

    Not those that the report of the engine has, nor waits: they are over.
    """
    said = said_by(
        b"2026-11-23T01:00:00Z [info     ] worker.up   w=1",
        b"2026-11-23T01:00:00Z [\033[33m\033[1mwarning  \033[0m] nats.error   error=x",
        b"2026-11-23T01:00:01Z [warning  ] nats.error   error=x",
        b"2026-11-23T01:00:01Z [error    ] worker.failed   error=y",
        b"2026-11-23T01:00:01Z [warning  ] frontend.no_tokenizer   effect=z",
        b"2026-11-23T01:00:01Z [warning  ] engine.lacks   lack=z",
        b"2026-11-23T01:00:01Z [warning  ] engine.awaited   waited_s=10",
    )

    assert ["serve | ! nats.error error=x", "serve | ! worker.failed error=y"] == said[:-1]


def test_warnings_of_json_logs() -> None:
    """They read as on a console: neither JSON in a text nor a time, by which equal ones would differ."""
    line = (
        b'{"process": "child", "error": "x y", "event": "nats.error", "level": "warning", "timestamp": "%d"}'
    )

    assert ["serve | ! nats.error error=x y"] == said_by(line % 1, line % 2)[:-1]


def test_ignored_variables_are_repeated() -> None:
    """They come before the logs are set up."""
    said = said_by(b"kvrouter worker: the variable KVROUTER_PROT is ignored: no such setting")

    assert ["serve | ! the variable KVROUTER_PROT is ignored: no such setting"] == said[:-1]


def test_warnings_are_bounded() -> None:
    """Many different warnings do not push the last line away."""
    assert MOST_WARNINGS + 1 == len(said_by(*(b"[warning  ] number=%d" % number for number in range(100))))


def test_curl() -> None:
    """The command survives a shell, whatever the model's name is."""
    words = shlex.split(curl("https://h:1", 'it\'s "m"', "Hello"))

    assert ["curl", "-k", "https://h:1/v1/completions"] == words[:3]
    assert '{"model": "it\'s \\"m\\"", "prompt": "Hello", "max_tokens": 16}' == words[-1]
