"""Routing settings that one request brings: headers, a `kvrouter` object in its JSON body, or `nvext`.

    x-kvrouter-mode            {"mode": …}            one of the modes
    x-kvrouter-overlap-weight  {"overlap_weight": …}  a number of at least 0, or auto
    x-kvrouter-temperature     {"temperature": …}     a number of at least 0
    x-kvrouter-dry-run         {"dry_run": …}         true or false
    x-kvrouter-target          {"target": …}          worker_id or worker_id/rank (mode direct)
    x-kvrouter-priority                               lower goes first, as in vLLM; wins over `priority`
    x-session-id               {"session": …}         the session's name; also `session_id`, agents' headers

Headers win over the object, and it over `nvext` (bodies/nvext.py): gateways in front of kvrouter set headers.
A wrong value is a 400. With --client-overrides off only the session, the bucket and a dry run are read, but
for clients with the operators' key; the rest is ignored and counted. What a client's key does not allow
(--keys-file) is a 403.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, TypeAlias

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import AUTO, OverlapWeight, Wanted, parse_wanted
from kvrouter.core.wire.values import valid_unicode
from kvrouter.errors import BadRequestError, KeyForbidsError, UnknownTargetError
from kvrouter.frontend.requests import agent_headers

DIRECT = "direct"
RANK_HEADER = "x-data-parallel-rank"
PRIORITY_HEADER = "x-kvrouter-priority"
# A session's name is kept in a table and sent to every peer.
MOST_SESSION_CHARACTERS = 256
_MOST_BUCKET_CHARACTERS = 256
# Of a value that is wrong.
_MOST_SHOWN_CHARACTERS = 200
_WHOLE = re.compile(r"[+-]?[0-9]{1,9}")  # nine digits fit in 32 bits, as `priority` in bodies has to
_SWITCH = {"true": True, "1": True, "false": False, "0": False}


@dataclass(frozen=True)
class AcceptedOverrides:
    """The modes and headers that this frontend accepts."""

    modes: Collection[str]
    default_mode: str
    session_header: str = "x-session-id"
    bucket_header: str = ""
    """The header of `--stage-one header:NAME`; empty if there is none."""
    agent_sessions: bool = False
    """Whether sessions are also read from the headers of agents (agent_headers.py)."""

    @cached_property
    def places(self) -> dict[str, str]:
        """The header of each field of `Overrides`."""
        return {
            "mode": "x-kvrouter-mode",
            "overlap_weight": "x-kvrouter-overlap-weight",
            "temperature": "x-kvrouter-temperature",
            "session": self.session_header,
            "dry_run": "x-kvrouter-dry-run",
            "target": "x-kvrouter-target",
        }

    @cached_property
    def headers(self) -> frozenset[str]:
        """All headers that change routing."""
        own = {self.bucket_header} if self.bucket_header else set()
        own |= agent_headers.HEADERS if self.agent_sessions else set()
        return frozenset(self.places.values()).union(own, {PRIORITY_HEADER})


@dataclass(frozen=True, slots=True)
class Overrides:
    """A request's settings. None or empty: not given."""

    mode: str = ""
    overlap_weight: OverlapWeight | None = None
    temperature: float | None = None
    session: str = ""
    dry_run: bool = False
    target: str = ""
    bucket: str = ""
    priority: int | None = None
    parent_session: str = ""


NO_OVERRIDES = Overrides()
_POWERS = frozenset({"mode", "overlap_weight", "temperature", "target"})
NO_NVEXT: Mapping[str, Any] = {}


@dataclass(frozen=True, slots=True)
class _Given:
    """A value, and where it was given."""

    value: Any
    field: str
    place: str

    def wrong(self, what: str) -> BadRequestError:
        shown = repr(self.value)
        if len(shown) > _MOST_SHOWN_CHARACTERS:
            shown = shown[:_MOST_SHOWN_CHARACTERS] + "…"
        return BadRequestError(f"{self.place}: {shown} {what}", param=self.field)


def read_overrides(
    headers: Mapping[str, str],
    body: Mapping[str, Any] | None,
    session_id: str | None,
    dialect: AcceptedOverrides,
    nvext: Mapping[str, Any] = NO_NVEXT,
    *,
    ignored: Callable[[], None] | None = None,
    forbidden: frozenset[str] = frozenset(),
) -> Overrides:
    """Read all settings; `nvext`: those of bodies/nvext.py.

    `ignored`: called if the client sent some that it has no right to; None: it may send all. `forbidden`:
    fields that the client's key does not allow.

    Raises BadRequestError, which names the field and its valid values, or KeyForbidsError.
    """
    places = dialect.places
    of_nvext = {field: _Given(value, f"nvext.{field}", "`nvext`") for field, value in nvext.items()}
    # Headers last: they win.
    given = {**of_nvext, **_in_body(body or {}, places), **_in_headers(headers, places)}
    priority = headers.get(PRIORITY_HEADER)
    for name in forbidden & given.keys():
        raise forbids(given[name].field, given[name].place)
    if priority is not None and "priority" in forbidden:
        raise forbids(PRIORITY_HEADER, f"header {PRIORITY_HEADER}")
    if ignored is not None:
        if priority is not None or not _POWERS.isdisjoint(given):
            ignored()
        given, priority = {name: one for name, one in given.items() if name not in _POWERS}, None
    if session_id and "session" not in given:
        given["session"] = _Given(session_id, "session_id", "`session_id`")
    readers = _READERS | {"mode": lambda one: _mode(one, dialect)}
    found = {name: readers[name](one) for name, one in given.items()}
    if dialect.agent_sessions:
        session, found["parent_session"] = agent_headers.read_sessions(headers)
        found.setdefault("session", session)
    bucket = headers.get(dialect.bucket_header, "") if dialect.bucket_header else ""
    overrides = Overrides(
        **found,
        bucket=valid_unicode(bucket)[:_MOST_BUCKET_CHARACTERS],
        priority=_priority(priority),
    )
    _check_target(overrides, given, dialect)
    return overrides


def forbids(field: str, place: str) -> KeyForbidsError:
    """The error for an override that a key does not allow."""
    return KeyForbidsError(
        f"{place}: the API key does not allow it (`overrides` of --keys-file)", param=field
    )


def find_wanted(target: str, headers: Mapping[str, str], pool: Pool) -> Wanted:
    """The target that a client names. Its rank may be in the header `x-data-parallel-rank` instead.

    Raises BadRequestError for a wrong rank, UnknownTargetError for a target that the pool does not have.
    """
    wanted = parse_wanted(target)
    worker = pool.workers.get(wanted.worker_id)
    if worker is None:
        # no names: not every client may know them
        raise UnknownTargetError(
            f"no worker {wanted.worker_id!r} serves {pool.model!r}; /workers of the admin listener lists them"
        )
    rank, given = wanted.rank, headers.get(RANK_HEADER)
    if given is not None and worker.card.rank_header:
        # isdecimal() is also true of other scripts' digits
        if not given.isascii() or not given.isdecimal() or rank not in {None, int(given)}:
            raise BadRequestError(
                f"header {RANK_HEADER}: {given!r} is not a rank of {target!r}", param=RANK_HEADER
            )
        rank = int(given)
    if rank is not None and rank >= worker.card.ranks:
        last = worker.card.ranks - 1
        raise UnknownTargetError(f"worker {wanted.worker_id!r} has no rank {rank}; its last one is {last}")
    return Wanted(wanted.worker_id, rank)


def _in_headers(headers: Mapping[str, str], places: Mapping[str, str]) -> dict[str, _Given]:
    given = [(field, header, headers.get(header)) for field, header in places.items()]
    return {
        field: _Given(value, header, f"header {header}")
        for field, header, value in given
        if value is not None
    }


def _in_body(body: Mapping[str, Any], places: Mapping[str, str]) -> dict[str, _Given]:
    unknown = sorted(body.keys() - places.keys())
    if unknown:
        raise BadRequestError(
            f"`kvrouter` has no field {unknown[0]!r}; it may have: {', '.join(places)}",
            param=f"kvrouter.{unknown[0]}",
        )
    return {
        field: _Given(value, f"kvrouter.{field}", f"`kvrouter.{field}`")
        for field, value in body.items()
        if value is not None
    }


def _mode(given: _Given, dialect: AcceptedOverrides) -> str:
    if not isinstance(given.value, str) or given.value not in {*dialect.modes, dialect.default_mode}:
        raise given.wrong(f"is not a mode; use one of {', '.join(sorted(dialect.modes))}")
    return given.value


def _amount(given: _Given, wrong: str = "is not a number of at least 0") -> float:
    try:
        # True and False are numbers in Python, but not in JSON.
        value = -1.0 if isinstance(given.value, bool) else float(given.value)
    except (TypeError, ValueError, OverflowError):
        value = -1.0
    if not (value >= 0 and math.isfinite(value)):
        raise given.wrong(wrong)
    return value


def _weight(given: _Given) -> OverlapWeight:
    return AUTO if given.value == AUTO else _amount(given, "is not a number of at least 0, nor auto")


def _switch(given: _Given) -> bool:
    value = _SWITCH.get(given.value.lower()) if isinstance(given.value, str) else given.value
    if not isinstance(value, bool):
        raise given.wrong("must be true or false")
    return value


def _session(given: _Given) -> str:
    value = given.value
    if not isinstance(value, str) or not value.isprintable() or len(value) > MOST_SESSION_CHARACTERS:
        raise given.wrong(f"must be text of at most {MOST_SESSION_CHARACTERS} printable characters")
    return value


def _target(given: _Given) -> str:
    if not isinstance(given.value, str):
        raise given.wrong("must be text: <worker_id> or <worker_id>/<rank>")
    parse_wanted(given.value)
    return given.value


def _check_target(overrides: Overrides, given: Mapping[str, _Given], dialect: AcceptedOverrides) -> None:
    """A target needs mode direct, and mode direct a target: neither is ignored without an error."""
    is_direct = (overrides.mode or dialect.default_mode) == DIRECT
    if overrides.target and not is_direct:
        raise given["target"].wrong("needs mode direct: also send x-kvrouter-mode: direct")
    if is_direct and not overrides.target:
        raise BadRequestError(
            "mode direct needs a target: send the header x-kvrouter-target: <worker_id>[/<rank>]",
            param="x-kvrouter-target",
        )


def _priority(given: str | None) -> int | None:
    if given is None:
        return None
    if not _WHOLE.fullmatch(given):
        raise BadRequestError(
            f"header {PRIORITY_HEADER}: {given!r} is not a whole number", param=PRIORITY_HEADER
        )
    return int(given)


_Reader: TypeAlias = Callable[[_Given], Any]
_READERS: dict[str, _Reader] = {
    "overlap_weight": _weight,
    "temperature": _amount,
    "session": _session,
    "dry_run": _switch,
    "target": _target,
}
