"""GET and POST /routing: mode, weights and thresholds of all replicas, while they run.

    POST here ──> Reload.change_routing                            this replica
        └──> Replica.routing ──heartbeat──> Replica.routing ──> Reload.change_routing      its peers, joiners

The latest change holds everywhere: the greater epoch, then the greater revision, of equal ones that of the
greater router id. Every heartbeat has it, so a replica that joins or was cut off learns it. It ends with
`undo`, with `reset`, or with the last replica. What is too far ahead is refused:
`core/fleet/routing_changes.py`.
"""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
import structlog
from msgspec import Meta, Struct

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.wire.heartbeats import RoutingChange, standing
from kvrouter.core.wire.values import MOST_NUMBER, SettingText
from kvrouter.errors import BadRequestError
from kvrouter.frontend.operators.views import json_answer
from kvrouter.frontend.reload import SWITCHES, Reload
from kvrouter.policies import CUSTOM
from kvrouter.relay.answer import Answer
from kvrouter.relay.request import Request
from kvrouter.replica.publishing import Publishing
from kvrouter.settings.declare import Declared, did_you_mean
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

_MODE = "router-mode"
_PARTS = {"policy", "rules", "admission"}
_FIXED_MODES = {"direct", CUSTOM}

_Value = SettingText | Annotated[float, Meta(ge=-1e300, le=1e300)] | bool | None  # 1e300: MOST_FINITE


# Unknown fields are rejected: a misspelt one would otherwise change nothing without an error.
class RoutingRequest(Struct, forbid_unknown_fields=True):
    settings: Annotated[dict[SettingText, _Value], Meta(max_length=64)] = {}
    undo: bool = False
    reset: bool = False
    who: SettingText = ""
    why: SettingText = ""


class RefusedChange(Struct, frozen=True):
    """A peer's change that is too far ahead to be followed."""

    epoch: int
    revision: int


class RoutingView(Struct, frozen=True):
    """/routing. `by`: a router id; settings are texts, as flags give them; `replicas`: their revisions.

    `epoch`: the number of resets; `refused`: by router id.
    """

    epoch: int
    revision: int
    by: str
    who: str
    why: str
    changed: dict[str, str]
    not_applied: dict[str, str]
    configured: dict[str, str]
    replicas: dict[str, int]
    refused: dict[str, RefusedChange]


class RoutingChanges:
    """The change of routing that one replica knows, and serves with."""

    def __init__(self, replica: Replica, publishing: Publishing, reload: Reload) -> None:
        self._replica = replica
        self._publishing = publishing
        self._reload = reload
        self._applied: RoutingChange | None = None
        self._not_applied: dict[str, str] = {}
        self._settings = {
            one.name: one
            for one in reload.configured.command.declared()
            if one.name == _MODE or (one.setting.reloadable and one.path[0] in _PARTS)
        }

    async def show(self, _request: Request) -> Answer:
        return json_answer(self._view())

    async def change(self, request: Request) -> Answer:
        """POST. Raises BadRequestError; then nothing is changed."""
        wanted = _read(await request.read())
        epoch, revision = standing(self._replica.routing)
        epoch, revision = (epoch + 1, 1) if wanted.reset else (epoch, revision + 1)
        if max(epoch, revision) > MOST_NUMBER:
            raise BadRequestError("/routing: no revision is left: send reset: true, or restart all replicas")
        texts = self._texts(wanted)
        self._replica.routing = RoutingChange(
            revision, str(self._replica.router_id), texts, wanted.who, wanted.why, epoch
        )
        self.apply()
        self._publishing.heartbeat_soon()
        return json_answer(self._view())

    def _texts(self, wanted: RoutingRequest) -> dict[str, str]:
        """All changed settings as they shall be. Raises BadRequestError."""
        if wanted.undo or wanted.reset:
            if wanted.settings:
                end = "reset" if wanted.reset else "undo"
                raise BadRequestError(f"/routing: {end} ends all changes: send it without settings")
            return {}
        if not wanted.settings:
            raise BadRequestError("/routing: give settings, or undo: true")
        known = self._replica.routing
        texts = dict(known.settings) if known is not None else {}
        for name, value in wanted.settings.items():
            one = self._setting(name)
            if value is None:
                texts.pop(name, None)
            else:
                texts[name] = one.text(self._value(one, _text(value)))
        return texts

    def apply(self) -> None:
        """Serve with the change that the replica knows. What cannot be used here is left out, and shown."""
        change = self._replica.routing
        assert change is not None
        if change is self._applied:  # a change that was made here: the inbox passes it on, too
            return
        self._applied = change
        values: dict[str, Any] = {}
        self._not_applied = {}
        for name, text in change.settings.items():
            try:
                values[name] = self._value(self._setting(name), text)
            except BadRequestError as error:  # a peer of another version, or with another queue
                self._not_applied[name] = str(error)
        self._reload.change_routing(values)
        facts = {name: getattr(change, name) for name in ("epoch", "revision", "by", "who", "why")}
        log.info("routing.changed", **facts, settings=change.settings, not_applied=self._not_applied)

    def samples(self) -> list[Sample]:
        _, revision = standing(self._replica.routing)
        return [("kvrouter_routing_revision", {}, revision)]

    def _view(self) -> RoutingView:
        change, configured = self._replica.routing, self._reload.configured
        changed = dict(change.settings) if change is not None else {}
        peers = {str(router_id): standing(beat.routing)[1] for router_id, beat in self._replica.peers.items()}
        epoch, revision = standing(change)
        return RoutingView(
            epoch=epoch,
            revision=revision,
            by=change.by if change is not None else "",
            who=change.who if change is not None else "",
            why=change.why if change is not None else "",
            changed=changed,
            not_applied=self._not_applied,
            configured={
                name: one.shown(configured.values[name]) or one.setting.default_text
                for name, one in self._settings.items()
            },
            replicas={str(self._replica.router_id): revision} | peers,
            refused={
                str(router_id): RefusedChange(one.epoch, one.revision)
                for router_id, one in self._replica.refused_routing().items()
            },
        )

    def _setting(self, name: str) -> Declared:
        one = self._settings.get(name)
        if one is None:
            near = did_you_mean(name, self._settings) or f"; settings: {', '.join(self._settings)}"
            raise BadRequestError(f"/routing: {name!r} cannot be changed while replicas run{near}")
        return one

    def _value(self, one: Declared, text: str) -> Any:
        try:
            value = one.read(text)
        except ValueError as error:
            raise BadRequestError(f"/routing: {one.name} {text!r}: {error}") from None
        settings = self._reload.configured.settings
        if one.name == _MODE and _FIXED_MODES & {text, settings.router_mode}:
            raise BadRequestError(
                f"/routing: {_MODE} {text!r}: mode direct and own policies are chosen when a replica starts"
            )
        if one.name in SWITCHES and bool(value) != bool(self._reload.configured.values[one.name]):
            raise BadRequestError(
                f"/routing: {one.name} {text!r}: to switch it on or off, restart the replicas"
            )
        return value


def _read(body: bytes) -> RoutingRequest:
    try:
        return msgspec.json.decode(body, type=RoutingRequest)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        names = ", ".join(RoutingRequest.__struct_fields__)
        raise BadRequestError(f"/routing: {error}; fields: {names}") from None


def _text(value: str | float | bool) -> str:
    if isinstance(value, bool):
        return "on" if value else "off"
    # JSON's 5 was read as 5.0, which settings of whole numbers reject: it becomes 5 again
    return value if isinstance(value, str) else f"{value:.15g}"
