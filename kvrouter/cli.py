"""`kvrouter COMMAND …`: one sub-command for each process and tool."""

from __future__ import annotations

import gc
import importlib
import sys
from collections.abc import Sequence
from types import ModuleType

from kvrouter.settings.commands import MODULES
from kvrouter.settings.declare import INTERRUPTED, did_you_mean
from kvrouter.version import __version__

_USAGE = """\
usage: kvrouter COMMAND [flags]

  serve      a whole deployment: NATS, an agent for each engine, the frontends
  frontend   one replica: OpenAI-compatible HTTP frontend with the router inside
  router     placement as a service: answers where a request should go, and relays nothing
  worker     the agent of an engine: announces it, forwards its KV events, reports its load
  mocker     a simulated engine with vLLM's HTTP surface and KV-event wire
  analyze    what a trace, or live traffic, holds for a router, and which flags fit it
  simulate   a trace replayed on simulated engines in virtual time, once per routing mode
  tune       the best settings for a trace, searched in the simulator and tested
  nats       the embedded NATS server on 127.0.0.1, until stopped
  nats-accounts
             users of NATS: an agent may publish in the name of its own workers only
  keys       makes, lists and ends the keys of clients
  verify     compares the state of live replicas: whether they agree on blocks and bookings
  index      lists the blocks in a replica's index, or compares those of two replicas
  doctor     looks at NATS, agents, engines and replicas, and reports what is wrong and what to do
  top        shows targets, traffic, and whether replicas agree, in a terminal

`kvrouter help COMMAND` lists the settings that matter first, `kvrouter COMMAND --help-all` all of them.
`kvrouter completion SHELL` prints a script that completes commands and flags in bash, zsh or fish.
`kvrouter --version` prints the version.
"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one sub-command and return its exit code."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    if words[:1] == ["help"]:
        words = [*words[1:2], "--help"]
    if not words or words[0] in {"-h", "--help", "--help-all", "help"}:
        print(_USAGE, end="")  # noqa: T201
        return 0
    if words[0] == "--version":
        print(__version__)  # noqa: T201
        return 0
    if words[0] == "completion":
        from kvrouter.settings import completion

        return completion.main(words[1:])
    if words[0] not in MODULES:
        near = did_you_mean(words[0], (*MODULES, "completion", "help")) or f"; commands: {', '.join(MODULES)}"
        print(f"kvrouter: no command {words[0]!r}{near}", file=sys.stderr)  # noqa: T201
        return 2
    try:
        code: int = _loaded(MODULES[words[0]].program).main(words[1:])
    except KeyboardInterrupt:  # while the modules are loaded
        return INTERRUPTED
    return code


def _loaded(name: str) -> ModuleType:
    gc.disable()  # nothing that is loaded is garbage
    try:
        return importlib.import_module(name)
    finally:
        gc.enable()
