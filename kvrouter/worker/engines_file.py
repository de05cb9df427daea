"""`--engines FILE`: several engines, one process. An entry has the agent's own flags as its keys.

    [[engine]]
    engine-url = "http://10.0.0.1:8000"
    kv-topic = "kv@10.0.0.1@Qwen/Qwen3-32B"     # what its events are told apart by
    label = ["zone=a"]

What is on the command line holds for every engine that does not say otherwise. A file that ends in
`.json` holds the same as JSON: `{"engine": [{"engine-url": …}, …]}`.
"""

from __future__ import annotations

import argparse
import json
import tomllib
from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn
from urllib.parse import urlsplit

from kvrouter.errors import ConfigError
from kvrouter.worker.options import AgentOptions, add_flags, read_options
from kvrouter.worker.zmq.sockets import is_bound

MAX_ENGINES = 1024
_OF_THE_PROCESS = ("nats", "namespace", "heartbeat-s", "log-", "engines", "help")


@dataclass(frozen=True, slots=True)
class EngineList:
    """The agents of one process. `shared` has the endpoints that several of them hear, with all topics."""

    agents: Sequence[AgentOptions]
    shared: dict[str, tuple[str, ...]]
    topic_filter: str = ""


class _EntryParser(argparse.ArgumentParser):
    """Says what is wrong instead of ending the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)


def read_engines(flags: argparse.Namespace) -> EngineList:
    """Read the file that `--engines` names. Raises ConfigError, naming the entry and the key."""
    path: Path = flags.engines
    if flags.engine_url or flags.worker_id or flags.state_file:
        raise ConfigError(
            "--engine-url, --worker-id and --state-file belong into the entries of --engines FILE"
        )
    entries = _entries(path, _read(path))
    agents = [_agent(f"{path}: {name}", entry, flags) for name, entry in _named(entries)]
    names = [f"{path}: {name}" for name, _ in _named(entries)]
    for what in ("worker-id", "state-file"):
        _refuse_equals(what, [getattr(agent, what.replace("-", "_")) for agent in agents], names)
    return EngineList(agents, _shared(agents, names), flags.kv_topic)


def _read(path: Path) -> Any:
    try:
        text = path.read_text(encoding="utf-8")
        return json.loads(text) if path.suffix == ".json" else tomllib.loads(text)
    except OSError as error:
        raise ConfigError(f"--engines {path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        kind = "JSON" if path.suffix == ".json" else "TOML"
        raise ConfigError(f"--engines {path} is not valid {kind}: {error}") from None


def _entries(path: Path, content: Any) -> list[dict[str, Any]]:
    """The list of engines, and nothing else beside it."""
    engines = content.get("engine") if isinstance(content, dict) else None
    if not isinstance(engines, list) or not engines or not all(isinstance(entry, dict) for entry in engines):
        raise ConfigError(f"--engines {path}: give one [[engine]] table for each engine")
    strays = sorted(content.keys() - {"engine"})
    if strays:
        raise ConfigError(
            f"--engines {path}: unknown key {strays[0]!r}; flags for all go on the command line"
        )
    if len(engines) > MAX_ENGINES:
        raise ConfigError(f"--engines {path}: {len(engines)} engines; at most {MAX_ENGINES} in one process")
    return engines


def _named(entries: Sequence[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    for number, entry in enumerate(entries, 1):
        yield f"engine {number} ({entry.get('engine-url', 'no engine-url')})", entry


def _agent(name: str, entry: dict[str, Any], flags: argparse.Namespace) -> AgentOptions:
    parser = _EntryParser(add_help=False, allow_abbrev=False)
    add_flags(parser)
    base = copy(flags)
    base.engines, base.kv_topic = None, None
    try:
        own = parser.parse_args([*_arguments(entry)], namespace=base)
        own.kv_topic = own.kv_topic or _default_topic(own)
        return read_options(own)
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _arguments(entry: dict[str, Any]) -> Iterator[str]:
    """An entry as command-line arguments."""
    for key, value in entry.items():
        if key.startswith(_OF_THE_PROCESS):
            raise ConfigError(f"{key!r} holds for the whole process: give --{key} on the command line")
        if isinstance(value, bool):
            yield f"--{key}" if value else f"--no-{key}"
            continue
        for single in value if isinstance(value, list) else [value]:
            if not isinstance(single, str | int | float):
                raise ConfigError(f"{key!r} must be text or a number, not {single!r}")
            yield f"--{key}={single}"


def _default_topic(own: argparse.Namespace) -> str:
    """`kv@HOST@…`, the common form; on an endpoint of its own an engine needs no topic."""
    if not own.kv_events or not is_bound(own.kv_events) or not own.engine_url:
        return ""
    return f"kv@{urlsplit(own.engine_url).hostname}@"


def _shared(agents: Sequence[AgentOptions], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Endpoints that are bound here, or heard by several engines, with their topics."""
    users: dict[str, list[tuple[str, str]]] = {}
    for agent, name in zip(agents, names, strict=True):
        for feed in agent.feeds:
            users.setdefault(feed.events, []).append((feed.topic, name))
    shared = {}
    for endpoint, pairs in users.items():
        if len(pairs) > 1 or is_bound(endpoint):
            topics, whose = zip(*pairs, strict=True)
            if not all(topics):
                raise ConfigError(
                    f"{whose[topics.index('')]}: kv-topic: say whose events on {endpoint} are its own"
                )
            _refuse_equals("kv-topic", topics, whose)
            shared[endpoint] = topics
    return shared


def _refuse_equals(what: str, values: Sequence[object], names: Sequence[str]) -> None:
    seen: dict[object, str] = {}
    for value, name in zip(values, names, strict=True):
        if value is not None and value in seen:
            raise ConfigError(
                f"{name}: {what} {str(value)!r} is also that of {seen[value]}: give each its own"
            )
        seen[value] = name
