"""`--engines FILE`: agents for several engines in one process. An entry has the agent's settings as its keys.

    [[engine]]
    engine-url = "http://10.0.0.1:8000"
    kv-topic = "kv@10.0.0.1@Qwen/Qwen3-32B"     # identifies its events on a shared endpoint
    label = ["zone=a"]

A flag on the command line holds for every engine whose entry does not set it. A file that ends in `.json`
has the same content as JSON: `{"engine": [{"engine-url": …}, …]}`.
"""

from __future__ import annotations

import json
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from kvrouter.errors import ConfigError
from kvrouter.settings.declare import Declared, built, did_you_mean
from kvrouter.settings.read import Loaded
from kvrouter.worker.options import AgentOptions
from kvrouter.worker.settings import WorkerSettings
from kvrouter.worker.zmq.sockets import agent_binds

MAX_ENGINES = 1024
_OF_THE_PROCESS = ("nats", "namespace", "heartbeat-s", "log-", "metrics-", "engines", "help")


@dataclass(frozen=True, slots=True)
class EngineList:
    """The agents of one process. `shared` has the endpoints that several of them use: endpoint -> topics."""

    agents: Sequence[AgentOptions]
    shared: dict[str, tuple[str, ...]]
    topic_filter: str = ""
    # Settings of entries that do nothing any more, with what to do instead.
    warnings: Sequence[str] = ()


def read_engines(loaded: Loaded[WorkerSettings], path: Path) -> EngineList:
    """Read the file that `--engines` names. Raises ConfigError, naming the entry and the key."""
    if not {"engine-url", "worker-id", "state-file"}.isdisjoint(loaded.sources):
        raise ConfigError(
            "--engine-url, --worker-id and --state-file belong in the entries of --engines FILE"
        )
    entries = _entries(path, _read(path))
    agents = [_agent(f"{path}: {name}", entry, loaded) for name, entry in _named(entries)]
    names = [f"{path}: {name}" for name, _ in _named(entries)]
    for what in ("worker-id", "state-file"):
        _reject_duplicates(what, [getattr(agent, what.replace("-", "_")) for agent in agents], names)
    warnings = [
        f"{path}: {one.name} is ignored: {one.setting.retired}"
        for one in loaded.command.declared()
        if one.setting.retired and any(one.name in entry for entry in entries)
    ]
    return EngineList(agents, _shared(agents, names), loaded.settings.events.kv_topic, warnings)


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
    """The entries of the file, which must contain nothing else."""
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


def _agent(name: str, entry: dict[str, Any], loaded: Loaded[WorkerSettings]) -> AgentOptions:
    """An entry's keys replace the values of the process; lists are joined."""
    declared = loaded.command.declared()
    # Also by former spellings. One that switches off is not a key, which has a value.
    by_key = {
        flag.removeprefix("--"): one
        for one in declared
        for flag in (one.flag, *one.setting.old)
        if not flag.startswith("--no-")
    }
    values = dict(loaded.values)
    # --kv-topic on the command line is the filter of shared sockets, not the topic of one engine
    values["kv-topic"] = ""
    try:
        for key, value in entry.items():
            one = _declared(key, by_key)
            texts = _texts(key, value)
            if len(texts) != 1 and not one.is_list:
                raise ConfigError(f"{key!r} must be one value")
            read = tuple(_value(one, text) for text in texts)
            values[one.name] = (*values[one.name], *read) if one.is_list else read[0]
        settings = built(WorkerSettings, declared, values)
        return settings.agent(settings.events.kv_topic or _default_topic(settings))
    except ConfigError as error:
        raise ConfigError(f"{name}: {error}") from None


def _declared(key: str, declared: Mapping[str, Declared]) -> Declared:
    if key.startswith(_OF_THE_PROCESS):
        raise ConfigError(f"{key!r} is a setting of the whole process: give --{key} on the command line")
    if key not in declared:
        raise ConfigError(f"{key!r}: no such setting{did_you_mean(key, declared)}")
    return declared[key]


def _texts(key: str, value: Any) -> list[str]:
    """A value of an entry as the command line would have it."""
    texts = []
    for single in value if isinstance(value, list) else [value]:
        if not isinstance(single, str | int | float):
            raise ConfigError(f"{key!r} must be text or a number, not {single!r}")
        texts.append(str(single).lower() if isinstance(single, bool) else str(single))
    return texts


def _value(one: Declared, text: str) -> Any:
    try:
        return one.read(text)
    except ValueError as error:
        raise ConfigError(f"{one.name} = {text!r}: {error}") from None


def _default_topic(settings: WorkerSettings) -> str:
    """`kv@HOST@`, which begins the usual topics. An engine on a separate endpoint needs no topic."""
    events, url = settings.events.kv_events, settings.engine.engine_url
    if not events or not agent_binds(events) or not url:
        return ""
    return f"kv@{urlsplit(url).hostname}@"


def _shared(agents: Sequence[AgentOptions], names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    """Endpoints that are bound here, or used by several engines: endpoint -> topics. Raises ConfigError."""
    users: dict[str, list[tuple[str, str]]] = {}
    for agent, name in zip(agents, names, strict=True):
        for each in agent.endpoints:
            users.setdefault(each.events, []).append((each.topic, name))
    shared = {}
    for endpoint, pairs in users.items():
        if len(pairs) > 1 or agent_binds(endpoint):
            topics, owners = zip(*pairs, strict=True)
            if not all(topics):
                owner = owners[topics.index("")]
                raise ConfigError(
                    f"{owner}: kv-topic is missing: several engines may publish on {endpoint}, "
                    "so give the topic of this one's events"
                )
            _reject_duplicates("kv-topic", topics, owners)
            shared[endpoint] = topics
    return shared


def _reject_duplicates(what: str, values: Sequence[object], names: Sequence[str]) -> None:
    seen: dict[object, str] = {}
    for value, name in zip(values, names, strict=True):
        if value is not None and value in seen:
            raise ConfigError(
                f"{name}: {what} {str(value)!r} is already used by {seen[value]}: give each engine another"
            )
        seen[value] = name
