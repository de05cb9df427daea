"""`--engine URL[,key=value…]`: an engine on the command line."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from urllib.parse import urlsplit

from kvrouter.core.wire.ids import check_worker_id
from kvrouter.errors import ConfigError
from kvrouter.settings.declare import SWITCHES
from kvrouter.worker.options import check_url, read_connector, worker_id_of

_FLAGS = {
    "kv": "--kv-events",
    "replay": "--kv-replay",
    "topic": "--kv-topic",
    "model": "--model",
    "block-size": "--kv-cache-block-size",
    "role": "--role",
    "connector": "--kv-connector",
    "bootstrap-port": "--bootstrap-port",
    "kv-address": "--kv-address",
    "kv-hash": "--kv-hash",
    "whole": "--whole",
}
_FORMS = {
    "kv": (re.compile(r"tcp://.+:\d{1,5}|ipc://.+"), "tcp://HOST:PORT"),
    "replay": (re.compile(r"tcp://.+:\d{1,5}|ipc://.+"), "tcp://HOST:PORT"),
    "block-size": (re.compile(r"[1-9][0-9]{0,6}"), "a number of tokens"),
    "role": (re.compile("both|prefill|decode"), "both, prefill or decode"),
    "bootstrap-port": (re.compile(r"[0-9]{1,5}"), "a port"),
    "kv-address": (re.compile(r".+:[0-9]{1,5}"), "HOST:PORT"),
    "whole": (re.compile("|".join(SWITCHES)), "true or false"),
}
# 0.0.0.0 as a destination is the loopback, too; the addresses 127.x.y.z stay different
_LOOPBACK = {"localhost", "::1", "0.0.0.0"}
_LABEL = "label."
_EXAMPLE = "http://127.0.0.1:9000,kv=tcp://127.0.0.1:5557,replay=tcp://127.0.0.1:5657"


@dataclass(frozen=True, slots=True)
class EngineSpec:
    """An engine and the values given for it; all others are queried from the engine."""

    url: str
    worker_id: str
    # The agent's flag -> its value.
    values: Mapping[str, str] = field(default_factory=dict)
    labels: Mapping[str, str] = field(default_factory=dict)

    def flags(self) -> list[str]:
        """The equivalent flags of the agent."""
        return [
            f"--engine-url={self.url}",
            f"--worker-id={self.worker_id}",
            *(f"{flag}={value}" for flag, value in self.values.items()),
            *(f"--label={key}={value}" for key, value in self.labels.items()),
        ]

    def text(self) -> str:
        """As --engine has it: the inverse of `read_engine`."""
        keys = {flag: key for key, flag in _FLAGS.items()}
        return ",".join(
            [
                self.url,
                *([] if self.worker_id == worker_id_of(self.url) else [f"id={self.worker_id}"]),
                *(f"{keys[flag]}={value}" for flag, value in self.values.items()),
                *(f"{_LABEL}{key}={value}" for key, value in self.labels.items()),
            ]
        )


def read_engine(text: str) -> EngineSpec:
    """Read one --engine. Raises ConfigError."""
    url, *pairs = text.split(",")
    if not url.startswith(("http://", "https://")):
        raise ConfigError(f"--engine {text!r}: must begin with the engine's URL, as in {_EXAMPLE}")
    check_url("--engine", url)
    worker_id, values, labels = worker_id_of(url), dict[str, str](), dict[str, str]()
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals or not value:
            raise ConfigError(f"--engine {text!r}: {pair!r} is not key=value")
        if key == "id":
            check_worker_id(f"--engine {text!r}: id", value)
            worker_id = value
        elif key.startswith(_LABEL) and key != _LABEL:
            labels[key.removeprefix(_LABEL)] = value
        elif key in _FLAGS:
            values[_FLAGS[key]] = _checked(text, key, value)
        else:
            known = ", ".join(["id", *_FLAGS, f"{_LABEL}NAME"])
            raise ConfigError(f"--engine {text!r}: unknown key {key!r}; keys: {known}")
    return EngineSpec(url.rstrip("/"), worker_id, values, labels)


def check_different(specs: Sequence[EngineSpec]) -> None:
    """Raise ConfigError if two are the same engine."""
    by_id: dict[str, EngineSpec] = {}
    by_address: dict[str, EngineSpec] = {}
    for spec in specs:
        same = by_address.setdefault(_address(spec.url), spec)
        if same is not spec:
            raise ConfigError(f"--engine {same.url} and {spec.url} are the same engine: remove one of them")
        former = by_id.setdefault(spec.worker_id, spec)
        if former is not spec:
            raise ConfigError(
                f"--engine {former.url} and {spec.url} are both {spec.worker_id!r}: give one of them id=NAME"
            )


def _address(url: str) -> str:
    """Host, port and path; all names of this machine's loopback become 127.0.0.1."""
    parts = urlsplit(url.lower())
    host = "127.0.0.1" if parts.hostname in _LOOPBACK else parts.hostname
    port = parts.port or (443 if parts.scheme == "https" else 80)
    return f"{host}:{port}{urlsplit(url).path}"  # upper and lower case differ in a path only


def _checked(text: str, key: str, value: str) -> str:
    form, shown = _FORMS.get(key, (None, ""))
    if form is not None and not form.fullmatch(value):
        raise ConfigError(f"--engine {text!r}: {key}={value}: use {shown}")
    try:
        return read_connector(value) if key == "connector" else value
    except ConfigError as error:
        raise ConfigError(f"--engine {text!r}: {error}") from None
