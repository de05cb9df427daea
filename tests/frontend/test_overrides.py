"""Overrides of one request: every place, every wrong value."""

from __future__ import annotations

from typing import Any

import pytest

from kvrouter.core.routing.policy import Wanted
from kvrouter.errors import BadRequestError, UnknownTargetError
from kvrouter.frontend.requests.overrides import AcceptedOverrides, Overrides, find_wanted, read_overrides
from kvrouter.policies import POLICIES
from tests.core.worlds import card, new_pool

DIALECT = AcceptedOverrides(sorted(POLICIES), "kv", "x-session-id", "x-bucket")


def read(headers: dict[str, str] | None = None, body: dict[str, Any] | None = None, **more: Any) -> Overrides:
    """The overrides in these headers and this object."""
    return read_overrides(headers or {}, body, more.get("session_id"), more.get("dialect", DIALECT))


def test_no_overrides() -> None:
    """Without values no field is set. null means absent."""
    assert Overrides() == read() == read(body={"mode": None, "temperature": None})


def test_headers_and_body_are_equal() -> None:
    """Each field can be given in both places."""
    headers = {
        "x-kvrouter-mode": "direct", "x-kvrouter-overlap-weight": "0", "x-kvrouter-temperature": "0.5",
        "x-kvrouter-dry-run": "True", "x-kvrouter-target": "w1/2", "x-session-id": "s",
    }  # fmt: skip
    body = {
        "mode": "direct", "overlap_weight": 0, "temperature": 0.5, "dry_run": True, "target": "w1/2",
        "session": "s",
    }  # fmt: skip

    assert read(headers) == read(body=body) == Overrides("direct", 0.0, 0.5, "s", True, "w1/2")


def test_a_header_comes_before_the_body() -> None:
    """Gateways set headers, so these win; `session_id` in the body comes last."""
    assert "p2c" == read({"x-kvrouter-mode": "p2c"}, {"mode": "random"}).mode
    assert ["h", "b", "i"] == [
        read({"x-session-id": "h"}, {"session": "b"}, session_id="i").session,
        read({}, {"session": "b"}, session_id="i").session,
        read(session_id="i").session,
    ]


def test_bucket() -> None:
    """Any value is accepted. Half surrogate pairs are replaced, and long values cut."""
    assert "gold" == read({"x-bucket": "gold"}).bucket
    assert "?" == read({"x-bucket": "\udc80"}).bucket
    assert 256 == len(read({"x-bucket": "x" * 9000}).bucket)


WRONG = [
    ({"x-kvrouter-mode": "fastest"}, None, "x-kvrouter-mode", "use one of direct, kv, kv-score"),
    ({}, {"mode": 3}, "kvrouter.mode", "use one of direct, kv, kv-score"),
    ({"x-kvrouter-overlap-weight": "-1"}, None, "x-kvrouter-overlap-weight", "not a number of at least 0"),
    ({"x-kvrouter-temperature": "nan"}, None, "x-kvrouter-temperature", "not a number of at least 0"),
    ({}, {"temperature": True}, "kvrouter.temperature", "not a number of at least 0"),
    ({}, {"overlap_weight": 10**400}, "kvrouter.overlap_weight", "not a number of at least 0"),
    ({"x-kvrouter-dry-run": "yes"}, None, "x-kvrouter-dry-run", "true or false"),
    ({}, {"dry_run": 1}, "kvrouter.dry_run", "true or false"),
    ({"x-session-id": "s" * 257}, None, "x-session-id", "256 printable characters"),
    ({"x-session-id": "\udc80"}, None, "x-session-id", "256 printable characters"),
    ({}, {"session": ["s"]}, "kvrouter.session", "256 printable characters"),
    ({}, {"weight": 1}, "kvrouter.weight", "it may have: mode, overlap_weight, temperature"),
    ({"x-kvrouter-target": "w1"}, None, "x-kvrouter-target", "needs mode direct"),
    ({"x-kvrouter-mode": "direct"}, None, "x-kvrouter-target", "needs a target"),
    ({"x-kvrouter-mode": "direct"}, {"target": 7}, "kvrouter.target", "<worker_id>/<rank>"),
]


@pytest.mark.parametrize(("headers", "body", "param", "told"), WRONG)
def test_wrong_values(headers: dict[str, str], body: dict[str, Any] | None, param: str, told: str) -> None:
    """The error names the place and the valid values."""
    with pytest.raises(BadRequestError) as caught:
        read(headers, body)

    assert (400, param) == (caught.value.status, caught.value.param)
    assert told in str(caught.value)


def test_a_long_wrong_value_is_shown_in_part() -> None:
    """200 characters of it, and what it must be."""
    with pytest.raises(BadRequestError, match=r"'s{199}… must be text of at most 256") as caught:
        read({}, {"session": "s" * 100_000})

    assert "kvrouter.session" == caught.value.param


def test_wanted_target() -> None:
    """With or without a rank. The client's rank header counts if the worker's card has a rank header."""
    pool = new_pool(card("w1", ranks=4, rank_header="X-data-parallel-rank"), card("w2"))

    assert Wanted(card("w1").worker_id) == find_wanted("w1", {}, pool)  # type: ignore[arg-type]
    assert 3 == find_wanted("w1/3", {}, pool).rank
    assert 2 == find_wanted("w1", {"x-data-parallel-rank": "2"}, pool).rank
    assert None is find_wanted("w2", {"x-data-parallel-rank": "2"}, pool).rank


@pytest.mark.parametrize(
    ("target", "headers", "status", "told"),
    [
        ("w9", {}, 404, "no worker 'w9' serves"),
        ("w1/4", {}, 404, "last one is 3"),
        ("w1", {"x-data-parallel-rank": "4"}, 404, "last one is 3"),
        ("w1", {"x-data-parallel-rank": "one"}, 400, "'one' is not a rank"),
        ("w1/1", {"x-data-parallel-rank": "2"}, 400, "not a rank of 'w1/1'"),
    ],
)
def test_wrong_targets(target: str, headers: dict[str, str], status: int, told: str) -> None:
    """A target that does not exist is a 404, a malformed one a 400."""
    pool = new_pool(card("w1", ranks=4, rank_header="X-data-parallel-rank"))

    with pytest.raises(BadRequestError, match=told) as caught:
        find_wanted(target, headers, pool)

    assert status == caught.value.status
    assert isinstance(caught.value, UnknownTargetError) == (status == 404)
