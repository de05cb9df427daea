"""Dynamo's `nvext`: each field takes effect, is refused with a remedy, or is ignored as documented."""

from __future__ import annotations

import json
from typing import Any

import pytest

from kvrouter.bodies.edits import apply, edits_of
from kvrouter.bodies.messages import parse as parse_message
from kvrouter.bodies.nvext import Nvext
from kvrouter.bodies.openai import CompletionRequest, parse_chat, parse_completion
from kvrouter.bodies.responses import parse as parse_response
from kvrouter.errors import BadRequestError
from kvrouter.frontend.requests.overrides import Overrides, read_overrides
from tests.frontend.fleet import BODY, FleetOf
from tests.frontend.test_overrides import DIALECT
from tests.frontend.workers import OK


def asked(nvext: Any, **fields: Any) -> CompletionRequest:
    """A completion with this object."""
    return parse_completion(json.dumps({"prompt": [1], "nvext": nvext, **fields}).encode())


def given(nvext: Any) -> Nvext:
    """The object as it is read."""
    found = asked(nvext).nvext
    assert found is not None
    return found


def overrides(nvext: Any, headers: dict[str, str] | None = None) -> Overrides:
    """What it overrides, beside these headers."""
    return read_overrides(headers or {}, None, None, DIALECT, given(nvext).overrides())


def test_a_worker_is_named() -> None:
    """By a number or a text, with a rank or without; headers win."""
    direct = Overrides("direct", target="7")

    assert direct == overrides({"backend_instance_id": 7}) == overrides({"decode_worker_id": "7"})
    assert direct == overrides({"backend_instance_id": 7, "decode_worker_id": 7})
    assert "0/1" == overrides({"backend_instance_id": 0, "dp_rank": 1}).target
    assert "w9" == overrides({"backend_instance_id": 7}, {"x-kvrouter-target": "w9"}).target


def test_hints_and_sessions() -> None:
    """A higher priority goes first there, a lower one here; the body's own priority and salt win."""
    assert -5 == asked({"agent_hints": {"priority": 5, "osl": 1024}}).priority
    assert 3 == asked({"agent_hints": {"priority": 5}}, priority=3).priority
    assert 0 == asked({"agent_hints": {"strict_priority": 0, "speculative_prefill": False}}).priority
    assert "s" == overrides({"session_control": {"session_id": "s", "action": "bind", "timeout": 60}}).session
    assert ("a", "b") == (
        asked({"cache_salt": "a"}).cache_salt,
        asked({"cache_salt": "a"}, cache_salt="b").cache_salt,
    )


def test_what_changes_nothing_is_ignored() -> None:
    """Wishes for the answer's metadata, traces, unknown fields, null."""
    ignored = {
        "annotations": ["token_ids"], "extra_fields": ["worker_id", "timing"], "greed_sampling": False,
        "agent_context": {"session_id": "r", "trajectory_id": "t"}, "backend_instance_id": None, "new": [1],
    }  # fmt: skip

    assert Overrides() == overrides(ignored) == overrides({})
    assert asked(None).nvext is None


@pytest.mark.parametrize(
    ("nvext", "param", "told"),
    [
        ({"greed_sampling": True}, "greed_sampling", "`temperature`: 0"),
        ({"use_raw_prompt": True}, "use_raw_prompt", "/v1/completions"),
        ({"token_data": [1, 2]}, "token_data", "as `prompt`"),
        ({"max_thinking_tokens": 5}, "max_thinking_tokens", "own field"),
        ({"prefill_worker_id": 0}, "prefill_worker_id", "not told apart"),
        ({"backend_instance_id": 1, "decode_worker_id": 2}, "decode_worker_id", "another worker"),
        ({"dp_rank": 1}, "dp_rank", "backend_instance_id"),
        ({"agent_hints": {"strict_priority": 2}}, "agent_hints.strict_priority", "agent_hints.priority"),
        ({"agent_hints": {"speculative_prefill": True}}, "agent_hints.speculative_prefill", "asked for"),
        ({"session_control": {"session_id": "s", "action": "open"}}, "session_control.action", "bind"),
    ],
)
def test_refused(nvext: dict[str, Any], param: str, told: str) -> None:
    """What would be ignored without the client knowing; the message says what to send instead."""
    with pytest.raises(BadRequestError, match=told) as caught:
        given(nvext).overrides()

    assert f"nvext.{param}" == caught.value.param


@pytest.mark.parametrize(
    "nvext",
    [
        [], "x", {"backend_instance_id": 1.5}, {"backend_instance_id": True}, {"dp_rank": -1},
        {"agent_hints": {"priority": 2**31}}, {"agent_hints": {"priority": "5"}}, {"agent_hints": []},
        {"session_control": {"action": "stop"}}, {"session_control": {"session_id": 3}}, {"cache_salt": 3},
    ],
)  # fmt: skip
def test_wrong_types(nvext: Any) -> None:
    """The error names the field."""
    with pytest.raises(BadRequestError, match=r"\$\.nvext") as caught:
        asked(nvext)

    assert "nvext" == caught.value.param


def test_engines_do_not_get_it() -> None:
    """It is removed, whatever else is there; its salt becomes the body's, unless that has one."""
    body = b'{"prompt":[1],"nvext":{"cache_salt":"a"},"x":1.50}'
    own = b'{"prompt":[1],"cache_salt":"b","nvext":{"cache_salt":"a"}}'

    assert b'{"prompt":[1],"x":1.50,"cache_salt":"a"}' == apply(edits_of(parse_completion(body)), body)
    assert b'{"prompt":[1],"cache_salt":"b"}' == apply(edits_of(parse_completion(own)), own)


def test_every_api_has_it() -> None:
    """Chats, messages and responses as completions."""
    chat = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 1}
    nvext = {"nvext": {"agent_hints": {"priority": 2}, "cache_salt": "a"}}
    parsed = [
        parse_chat(json.dumps(chat | nvext).encode()),
        parse_message(json.dumps(chat | nvext).encode()),
        parse_response(json.dumps({"input": "hi"} | nvext).encode()),
    ]

    assert [(-2, "a")] * 3 == [(one.priority, one.cache_salt) for one in parsed]
    assert all(len(edits_of(one)) == 1 for one in parsed)


async def test_over_http(fleet_of: FleetOf) -> None:
    """The named worker gets the request without the object; an unknown one is a 404 that names all."""
    async with fleet_of(scripts=(OK, OK, OK)) as fleet:
        for _ in range(3):
            await fleet.ask({**BODY, "nvext": {"backend_instance_id": "w2", "extra_fields": ["worker_id"]}})
        unknown = await fleet.ask({**BODY, "nvext": {"backend_instance_id": 7}})

        assert ["w2"] * 3 == fleet.requests
        assert BODY == fleet.workers[2].requests[0].json
        assert 404 == unknown.status
        assert "no worker '7' serves" in unknown.json["error"]["message"]
