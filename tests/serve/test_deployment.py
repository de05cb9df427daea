"""The report of an engine."""

from __future__ import annotations

from kvrouter.serve.deployment import report
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
  tokenizer   /models/tiny""" == "\n".join(report(OPTIONS, facts, TokenizerReport("/models/tiny")))


def test_much_missing() -> None:
    """Each missing item is reported with its remedy."""
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), tokenizer="Org/Model", lacks=(EVENTS_OFF,))

    lines = list(report(OPTIONS, facts, TokenizerReport("none", "no tokenizer: why")))

    assert "  blocks      unknown" in lines
    assert "  events      none: placed by load" in lines
    assert f"  ! {EVENTS_OFF}" in lines
    assert "  ! no tokenizer: why" == lines[-1]


def test_events_not_used() -> None:
    """Events that the frontends do not use are reported as unused, with the reason."""
    facts = EngineFacts(Models(("m",), ()), "", Scrape(), endpoints=(EventEndpoints("tcp://e:2"),))

    lines = list(report(OPTIONS, facts, TokenizerReport("none: by text"), no_events="--tokenizer none"))

    assert "  events      tcp://e:2 (not used: --tokenizer none)" in lines
    assert "  tokenizer   none: by text" == lines[-1]
