"""Mode direct: the client names the target."""

from __future__ import annotations

import pytest

from kvrouter.core.routing.policy import RouteRequest, Wanted
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import BadRequestError, NoWorkersError
from kvrouter.policies.baseline import Direct
from tests.policies.tables import candidate, columns, moment, picked

RANKS = [
    candidate("w1", rank=0, requests=5),
    candidate("w1", rank=1, requests=2),
    candidate("w2", rank=0, requests=0),
]


def wanting(worker_id: str, rank: int | None = None) -> RouteRequest:
    """A request for this worker."""
    return RouteRequest("req", wanted=Wanted(WorkerId(worker_id), rank))


def test_named_rank() -> None:
    """Exactly this one, however busy."""
    assert 0 == Direct().pick(wanting("w1", 0), columns(RANKS), moment())
    assert ["w2"] == picked(Direct(), RANKS, wanting("w2", 0))


def test_worker_without_rank() -> None:
    """Of its ranks the one with the fewest requests."""
    assert 1 == Direct().pick(wanting("w1"), columns(RANKS), moment())


def test_no_target_named() -> None:
    """The error names the header to send."""
    with pytest.raises(BadRequestError, match="x-kvrouter-target"):
        Direct().pick(RouteRequest("req"), columns(RANKS), moment())


def test_named_target_is_away() -> None:
    """503, with the targets that there are."""
    with pytest.raises(NoWorkersError, match="w3 takes no requests now; there are: w1/0, w1/1, w2/0"):
        Direct().pick(wanting("w3"), columns(RANKS), moment())
    with pytest.raises(NoWorkersError, match="w2/7 takes"):
        Direct().pick(wanting("w2", 7), columns(RANKS), moment())
