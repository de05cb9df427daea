"""What is changed in a client's body, and that nothing else is."""

from __future__ import annotations

import pytest

from kvrouter.bodies.edits import apply, edits_of, without_overrides
from kvrouter.bodies.openai import parse_completion
from kvrouter.errors import BadRequestError
from tests.frontend.fleet import BODY, FleetOf


def edited(body: bytes) -> bytes:
    """A completion's body after the edits it needs."""
    return apply(edits_of(parse_completion(body)), body)


def test_values_keep_their_bytes() -> None:
    """Only the object `kvrouter` goes: 1.50 stays 1.50, escapes stay, and so does a number of any size."""
    body = b'{"a":1.50,"kvrouter":{"mode":"kv"},"b":"\\u00e9\\/","c":12345678901234567890123}'

    assert b'{"a":1.50,"b":"\\u00e9\\/","c":12345678901234567890123}' == without_overrides(body)


async def test_report_mode_is_removed(fleet_of: FleetOf) -> None:
    """The engine never gets a client's report mode: it would corrupt the counts of the engine's agent."""
    body = {**BODY, "vllm_xargs": {"kv_cache_report_mode": "full", "other": 1}}
    async with fleet_of() as fleet:
        await fleet.ask(body)

        assert {**BODY, "vllm_xargs": {"other": 1}} == fleet.workers[0].requests[0].json


def test_both_edits() -> None:
    """A body may need both; JSON's escapes do not hide a name."""
    body = b'{"prompt":[1],"vllm_xargs":{"kv\\u005fcache_report_mode":"full","n":1.50},"kvrouter":{}}'

    assert b'{"prompt":[1],"vllm_xargs":{"n":1.50}}' == edited(body)


@pytest.mark.parametrize(
    "body",
    [
        b'{"prompt": "about kv_cache_report_mode"}',
        b'{"prompt": "x", "vllm_xargs": "kv_cache_report_mode"}',
        b'{"prompt": "x", "vllm_xargs": ["kv_cache_report_mode"]}',
        b'{"prompt": "x", "vllm_xargs": {"a": "kv_cache_report_mode"}}',
        b'{"prompt": "x", "vllm_xargs": null, "kvrouter": null}',
    ],
)
def test_other_bodies_stay(body: bytes) -> None:
    """A body that only mentions the mode stays as it is, to the byte."""
    assert body is edited(body)


def test_name_that_is_not_utf_8() -> None:
    """A body that was parsed but cannot be edited is a bad request."""
    with pytest.raises(BadRequestError, match="not valid JSON"):
        edited(b'{"prompt": "x", "kvrouter": {}, "\xff": 1}')
