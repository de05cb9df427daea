"""Changes settings of a running frontend: SIGHUP, or POST /config/reload on the admin listener.

flags, environment, file ──read again, in a thread──> all checked ──> RunningSettings.apply, in one step
                                    └── wrong: nothing changes ──> the reason

No await comes between two changes, so each request is served with the old settings or with the new ones.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from msgspec import Struct

from kvrouter.core.fleet.replica import Replica
from kvrouter.errors import BadRequestError, ConfigError
from kvrouter.frontend.keys.clients import ClientKeys
from kvrouter.frontend.keys.keys_file import Keys
from kvrouter.frontend.operators.rights import AdminKey
from kvrouter.frontend.operators.views import json_answer
from kvrouter.frontend.requests.accept import Accept
from kvrouter.frontend.requests.admission_queue import WaitingRoom
from kvrouter.frontend.requests.completions import Completions
from kvrouter.frontend.requests.rules import Rules
from kvrouter.frontend.settings import FrontendOptions
from kvrouter.processes.reloading import log_changes
from kvrouter.relay.answer import Answer
from kvrouter.relay.certificate import ServerCertificate
from kvrouter.relay.request import Request
from kvrouter.settings.read import Loaded
from kvrouter.settings.reload import CHANGED, Changes, log_failure, read_again
from kvrouter.tokens.remote_tokenizer import EngineTokenizer

# Their value may change, but what they switch on or off is decided at the start.
SWITCHES = {"router-queue-threshold", "tls-cert", "tls-key", "keys-file", "api-key"}


@dataclass(frozen=True, slots=True)
class Fresh:
    """Settings that were read again and can be applied, with the keys from their files."""

    loaded: Loaded[FrontendOptions]
    admin_key: str | None
    engine_api_key: str | None
    keys: Keys | None
    changes: Changes


def read_fresh(current: Loaded[FrontendOptions]) -> Fresh:
    """What is applied, if the settings are read again now. Changes nothing. Raises ConfigError."""
    loaded, changes = read_again(current, SWITCHES)
    settings = loaded.settings
    # a policy that was made keeps what it has learnt
    policy = replace(settings.policy, custom=current.settings.policy.custom)
    loaded = replace(loaded, settings=replace(settings, policy=policy))
    keys, engine_key = loaded.settings.keys, settings.tokens.engine_api_key
    return Fresh(loaded, settings.process.admin_key, engine_key, keys, changes)


@dataclass(frozen=True, slots=True)
class RunningSettings:
    """The parts of a frontend whose settings can change."""

    replica: Replica
    rules: Rules
    accept: Accept
    completions: Completions
    waiting_room: WaitingRoom
    key: AdminKey
    clients_keys: ClientKeys
    engines: EngineTokenizer
    certificate: ServerCertificate | None

    def apply_routing(self, new: FrontendOptions) -> None:
        """Route with these settings from the next request on."""
        self.rules.change(new.rules, new.router_mode, new.policy, self.replica.routers)
        self.accept.dialect = replace(self.accept.dialect, default_mode=new.router_mode)
        self.waiting_room.change(new.admission)

    def apply(self, old: FrontendOptions, fresh: Fresh) -> None:
        """Use these settings from now on, and add to the changes the files whose contents are others."""
        new, applied = fresh.loaded.settings, fresh.changes.applied
        self.apply_routing(new)
        self.accept.aliases = new.aliases
        self.completions.limits = new.limits
        self.replica.deadly.ttl_s = new.deadly_prompt_ttl_s
        self.completions.readers.access.change(new.access)
        if new.policy.scored != old.policy.scored:
            applied.setdefault("router-config", CHANGED)
        if self.key.change(fresh.admin_key):
            applied.setdefault("admin-key-file", CHANGED)
        if self.clients_keys.change(fresh.keys):
            self.accept.limits.change()
            applied.setdefault("keys-file", CHANGED)
        if self.engines.use_key(fresh.engine_api_key):
            applied.setdefault("engine-api-key-file", CHANGED)
        if (
            self.certificate is not None
            and new.tls.files is not None
            and self.certificate.renew(new.tls.files)
        ):
            applied.setdefault("tls-cert", CHANGED)


class Reloaded(Struct, frozen=True):
    """POST /config/reload: `old → new` by setting, as Changes has them."""

    changed: dict[str, str]
    needs_restart: dict[str, str]


class Reload:
    """The settings of a running frontend, and their change. What POST /routing has changed goes before."""

    def __init__(self, loaded: Loaded[FrontendOptions], running: RunningSettings) -> None:
        self._loaded = loaded
        self._running = running
        self._routing: Mapping[str, Any] = {}
        self._lock = asyncio.Lock()  # a SIGHUP and a POST may come at once, and reading waits for a thread

    @property
    def configured(self) -> Loaded[FrontendOptions]:
        """The settings as they were read last."""
        return self._loaded

    def change_routing(self, values: Mapping[str, Any]) -> None:
        """Route with these values, by setting, instead of the configured ones; without any, with those."""
        self._routing = values
        self._running.apply_routing(self._served(self._loaded).settings)

    def _served(self, loaded: Loaded[FrontendOptions]) -> Loaded[FrontendOptions]:
        settings = loaded.settings
        for one in loaded.command.declared():
            if one.name in self._routing:
                settings = _replaced(settings, one.path, self._routing[one.name])
        return replace(loaded, settings=settings)

    async def reload(self) -> Changes:
        """Read the settings again and apply what can change. Raises ConfigError; then all stays as it was."""
        async with self._lock:
            try:
                fresh = await asyncio.to_thread(read_fresh, self._loaded)
            except ConfigError as error:
                log_failure(error)
                raise
            old, new = self._loaded.settings, fresh.loaded.settings
            self._running.apply(old, replace(fresh, loaded=self._served(fresh.loaded)))
            self._loaded = fresh.loaded
            log_changes(fresh.changes, old.log_level, new.log_level)
        return fresh.changes

    async def view(self, _request: Request) -> Answer:
        """POST /config/reload. Raises BadRequestError."""
        try:
            changes = await self.reload()
        except ConfigError as error:
            raise BadRequestError(f"nothing was changed: {error}") from None
        return json_answer(Reloaded(changes.applied, changes.needs_restart))


def _replaced(settings: Any, path: Sequence[str], value: Any) -> Any:
    """A dataclass with another value in a dataclass in it."""
    name, *rest = path
    return replace(settings, **{name: _replaced(getattr(settings, name), rest, value) if rest else value})
