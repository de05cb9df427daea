"""Filters: which candidates a policy may pick from."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from kvrouter.core.routing.breaker import BreakerSettings, CircuitBreakers
from kvrouter.core.routing.builtin_policy import Moment
from kvrouter.core.routing.filters import (
    Breaker,
    Busy,
    Filter,
    FilterSettings,
    Fits,
    Locality,
    MaxOngoing,
    Multiplex,
    Rest,
    Session,
    new_filters,
)
from kvrouter.core.routing.policy import Candidate, RouteRequest, Wanted
from kvrouter.core.routing.selection import Selection
from kvrouter.core.tables.sessions import SessionTable
from kvrouter.core.wire.ids import WorkerId
from kvrouter.policies.baseline import LeastLoaded
from tests.policies.tables import REQUEST, candidate, columns, moment, target


def kept(
    what: Filter,
    *candidates: Candidate,
    request: RouteRequest = REQUEST,
    using: Moment | None = None,
) -> list[str]:
    """The workers that stay."""
    return [str(one.target.worker_id) for one in what.keep(request, columns(candidates), using or moment())]


def test_busy_prefill_threshold_is_strict() -> None:
    """Above 500 charged tokens is busy, exactly 500 is not; the request itself does not count."""
    candidates = [candidate("w1", charged=500), candidate("w2", charged=501), candidate("w3", overlap=9)]

    assert ["w1", "w3"] == kept(Busy(active_prefill_tokens=500), *candidates)


def test_busy_decode_threshold_is_a_fraction() -> None:
    """Above 85 of 100 blocks is busy; a worker whose capacity is unknown never is."""
    hundred = {"device": 100}
    candidates = [
        candidate("w1", active=85, tiers=hundred),
        candidate("w2", active=86, tiers=hundred),
        candidate("w3", active=10**6),
    ]

    assert ["w1", "w3"] == kept(Busy(active_decode_blocks=0.85), *candidates)


def test_either_threshold_is_enough() -> None:
    """One threshold is enough to be busy; without thresholds no target is."""
    candidates = [candidate("w1", charged=9), candidate("w2", active=9, tiers={"device": 10})]

    assert [] == kept(Busy(0.5, 5), *candidates)
    assert ["w1", "w2"] == kept(Busy(), *candidates)


def test_max_ongoing_requests() -> None:
    """A target that has reached the limit gets no more requests."""
    assert ["w1"] == kept(MaxOngoing(3), candidate("w1", requests=2), candidate("w2", requests=3))


def test_multiplex() -> None:
    """Targets with the adapter, else targets with the fewest adapters; the base model goes anywhere."""
    loaded = candidate("w1", lora_names=("a", "b"))
    few, many = candidate("w2", lora_names=("c",)), candidate("w3", lora_names=("c", "d"))
    wanted = RouteRequest("req", lora_name="a")

    assert ["w1"] == kept(Multiplex(), loaded, few, many, request=wanted)
    assert ["w2"] == kept(Multiplex(), few, many, request=wanted)
    assert ["w3"] == kept(Multiplex(), many, request=wanted)
    assert ["w1", "w2"] == kept(Multiplex(), loaded, few)
    assert [] == kept(Multiplex(), request=wanted)


def test_locality() -> None:
    """The same node, else the same zone, else all; an unknown node or zone narrows nothing."""
    near = candidate("w1", labels={"node": "n1", "zone": "z1"})
    zone = candidate("w2", labels={"node": "n2", "zone": "z1"})
    far = candidate("w3", labels={"zone": "z2"})

    assert ["w1"] == kept(Locality("n1", "z1"), near, zone, far)
    assert ["w2"] == kept(Locality("n1", "z1"), zone, far)
    assert ["w3"] == kept(Locality("n1", "z1"), far)
    assert ["w1", "w2"] == kept(Locality(zone="z1"), near, zone, far)
    assert ["w1", "w2", "w3"] == kept(Locality(), near, zone, far)


@pytest.fixture
def bound() -> Moment:
    """Session "chat" is bound to w2."""
    sessions = SessionTable()
    sessions.bind("chat", target("w2"), 0.0)
    return moment(sessions=sessions)


CHAT = RouteRequest("req", REQUEST.prompts, session="chat")


def selected(settings: FilterSettings, using: Moment, *candidates: Candidate) -> list[str]:
    """The workers that are eligible for a request of the session."""
    selection = Selection(LeastLoaded(), new_filters(settings))
    return [str(one.target.worker_id) for one in selection.eligible(CHAT, columns(candidates), using)]


def test_session_stays(bound: Moment) -> None:
    """Hard or soft, a session stays on its target; other requests may go anywhere."""
    both = [candidate("w1"), candidate("w2")]

    assert ["w2"] == selected(FilterSettings(session_affinity="soft"), bound, *both)
    assert ["w2"] == selected(FilterSettings(session_affinity="hard"), bound, *both)
    assert ["w1", "w2"] == kept(Session(), *both, using=bound)
    assert ["w1", "w2"] == kept(Session(), *both, using=bound, request=RouteRequest("r", session="new"))


def test_full_target_of_a_session(bound: Moment) -> None:
    """Soft: the session moves to another target. Hard: no target is left, so it waits or fails."""
    candidates = [candidate("w1"), candidate("w2", requests=4)]

    assert ["w1"] == selected(
        FilterSettings(max_ongoing_requests=4, session_affinity="soft"), bound, *candidates
    )
    assert [] == selected(FilterSettings(max_ongoing_requests=4, session_affinity="hard"), bound, *candidates)


def test_session_whose_target_is_gone(bound: Moment) -> None:
    """The session may be bound to another target, hard or soft."""
    for affinity in ("soft", "hard"):
        settings = FilterSettings(session_affinity=affinity)
        assert ["w1", "w3"] == selected(settings, bound, candidate("w1"), candidate("w3"))


def test_requirements_come_before_preferences() -> None:
    """The near worker is full: it is removed before locality applies, so a far one is taken."""
    near = candidate("w1", requests=4, labels={"node": "n1"})
    far = candidate("w2", labels={"node": "n2"})
    settings = FilterSettings(max_ongoing_requests=4, node="n1")

    assert ["w2"] == selected(settings, moment(), near, far)


@pytest.mark.parametrize(
    "preference", [Session(), Session(is_hard=True), Multiplex(), Locality("n1", "z1")], ids=str
)
def test_preferences_leave_a_named_target_alone(bound: Moment, preference: Filter) -> None:
    """A request with a named target ignores session, adapter and locality."""
    near = candidate("w2", labels={"node": "n1", "zone": "z1"}, lora_names=("a",))
    named = RouteRequest("req", lora_name="a", session="chat", wanted=Wanted(WorkerId("w1")))
    anywhere = structs.replace(named, wanted=None)

    assert ["w1", "w2"] == kept(preference, candidate("w1"), near, request=named, using=bound)
    assert ["w2"] == kept(preference, candidate("w1"), near, request=anywhere, using=bound)


def test_circuit_breaker() -> None:
    """A target with an open circuit gets no request until `open_s` has passed."""
    circuits = CircuitBreakers(BreakerSettings(failures=1, open_s=60.0))
    both = [candidate("w1"), candidate("w2")]
    assert ["w1", "w2"] == kept(Breaker(circuits), *both)

    circuits.failed(target("w1"), 0.0)

    assert ["w2"] == kept(Breaker(circuits), *both, using=moment(now=59.9))
    assert ["w1", "w2"] == kept(Breaker(circuits), *both, using=moment(now=60.0))


@given(st.lists(st.sampled_from([0, 10, 20, 30]), min_size=1), st.integers(0, 40))
def test_contexts(lengths: list[int], needed: int) -> None:
    """A target stays if the request fits or its context is unknown; if it fits none, the longest stay."""
    candidates = [candidate(f"w{place}", max_model_len=length) for place, length in enumerate(lengths)]
    fit = [f"w{place}" for place, length in enumerate(lengths) if not length or length >= needed]
    longest = [f"w{place}" for place, length in enumerate(lengths) if length == max(lengths)]

    asked = structs.replace(REQUEST, context_tokens=needed)
    assert (fit or longest) == kept(Fits(), *candidates, request=asked)
    everywhere = [f"w{place}" for place in range(len(lengths))]
    assert everywhere == kept(Fits(), *candidates)
    named = structs.replace(asked, wanted=Wanted(WorkerId("w0"), None))
    assert everywhere == kept(Fits(), *candidates, request=named)


def test_no_settings_no_filters() -> None:
    """Without agents' sessions, the default settings need only what engines say."""
    assert (Fits(), Rest()) == new_filters(FilterSettings(agent_sessions=False))


def test_order_of_filters() -> None:
    """Requirements come before preferences."""
    settings = FilterSettings(0.9, 1000, 8, "soft", multiplex=True, zone="z")

    assert [
        "fits",
        "circuit-breaker",
        "busy",
        "max-ongoing-requests",
        "retry-after",
        "session",
        "agent-session",
        "multiplex",
        "locality",
    ] == [one.name for one in new_filters(settings, CircuitBreakers())]
