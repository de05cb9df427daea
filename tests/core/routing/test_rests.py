"""Targets that asked to be left alone."""

from __future__ import annotations

from msgspec import structs

from kvrouter.core.routing.filters import FilterSettings, Rest, new_filters
from kvrouter.core.routing.policy import Wanted
from kvrouter.core.routing.rests import Rests
from kvrouter.core.wire.ids import WorkerId
from tests.core.routing.test_filters import kept
from tests.policies.tables import REQUEST, candidate, moment, target

W1, W2 = target("w1"), target("w2")


def test_rest_ends() -> None:
    """A rest ends at its time, and leaves nothing behind."""
    rests = Rests()
    rests.ask(W1, until=10.0)

    assert [False, True] == [rests.is_awake(each, 9.9) for each in (W1, W2)]
    assert rests.is_awake(W1, 10.0)
    assert not rests.until


def test_longer_rest_stays() -> None:
    """A shorter rest does not end a longer one; a target that is gone does not rest."""
    rests = Rests()
    rests.ask(W1, until=10.0)
    rests.ask(W1, until=5.0)
    assert not rests.is_awake(W1, 7.0)

    rests.forget(W1)

    assert rests.is_awake(W1, 7.0)


def test_filter() -> None:
    """Targets that rest are no candidates, unless all rest or the request names one."""
    now = moment()
    candidates = [candidate("w1"), candidate("w2")]
    assert ["w1", "w2"] == kept(Rest(), *candidates, using=now)

    now.tables.rests.ask(W1, now.now + 5)
    assert ["w2"] == kept(Rest(), *candidates, using=now)
    named = structs.replace(REQUEST, wanted=Wanted(WorkerId("w1"), None))
    assert ["w1", "w2"] == kept(Rest(), *candidates, using=now, request=named)

    now.tables.rests.ask(W2, now.now + 5)
    assert ["w1", "w2"] == kept(Rest(), *candidates, using=now)


def test_always_there() -> None:
    """The filter needs no setting, and applies before the preferences that may be set."""
    filters = new_filters(FilterSettings(session_affinity="soft"))

    assert ["fits", "retry-after", "session"] == [each.name for each in filters][:3]
