"""Whatever the engines' request models accept is accepted here, and read as they read it.

The models are built of the fields that scripts/kit/engine_requests.py has recorded from the engines' wheels.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal, Optional, Union

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model

from kvrouter.bodies import messages, openai, responses
from kvrouter.bodies.openai import CompletionRequest
from kvrouter.frontend.requests import passthrough
from kvrouter.relay.request import Request, RequestHead
from scripts.kit import engine_requests
from tests.long import needs_long
from tests.relay.rig import FakeClient

RECORDED = json.loads(engine_requests.RECORDED.read_text())
HELLO = [{"role": "user", "content": "hello"}]
TYPES = {"Any": Any, "Optional": Optional, "Union": Union, "Literal": Literal}
LIMITS = ("ge", "le", "gt", "lt", "min_length", "max_length")


def model_of(fields: Mapping[str, Mapping[str, Any]]) -> type[BaseModel]:
    """A pydantic model with these fields; optional fields are None if absent."""
    made: dict[str, Any] = {}
    for name, about in fields.items():
        limits = {limit: about[limit] for limit in LIMITS if limit in about}
        default = ... if about.get("required") else None
        made[f"{name}_"] = (eval(about["type"], TYPES), Field(default, alias=name, **limits))
    return create_model("Model", __config__=ConfigDict(extra="allow"), **made)


MODELS = {
    (engine, route): [model_of(fields) for fields in models]
    for engine, recorded in RECORDED.items()
    for route, models in recorded["models"].items()
}


def embeddings(body: bytes) -> CompletionRequest:
    """A body of /v1/embeddings, as a route that is passed on reads it."""
    head = RequestHead(
        "POST", "/v1/embeddings", [("content-type", "application/json")], wants_keep_alive=True
    )
    return passthrough.parse(Request(head, FakeClient()), body)


PARSERS: dict[str, Callable[[bytes], CompletionRequest]] = {
    "/v1/chat/completions": openai.parse_chat,
    "/v1/completions": openai.parse_completion,
    "/v1/messages": messages.parse,
    "/v1/responses": responses.parse,
    "/v1/embeddings": embeddings,
}
FILLED: dict[str, Any] = {
    "messages": HELLO,
    "prompt": "hello",
    "input": "hello",
    "model": "m",
    "max_tokens": 5,
}

# Spellings of truth values and numbers, and other values that a field may have.
SPELLED = st.sampled_from(
    [
        None, True, False, 0, 1, 2, -1, 7, 0.0, 1.0, 2.0, 1.5, -0.0, 1e2, 2**31, 2**63, 2**64, 10**30, 1e300,
        "true", "True", "FALSE", "on", "off", "t", "f", "y", "N", "yes", "no", "0", "1", " 1", "1 ", "01",
        "-1", "+2", "2", "2.0", "2.", "2.5", "1_000", "1__0", "_1", "1_", "1e2", "", " ", "null", "nan", "m",
        "é", [], {}, ["a"], [1], [1.0, "2"], [[1], [2]], {"a": 1}, [None], "x" * 2000, "\uff11",
    ]
)  # fmt: skip
READ = [
    "stream", "n", "model", "priority", "echo", "use_beam_search", "session_id", "cache_salt", "store",
    "prompt_logprobs", "logprobs", "request_id", "previous_response_id", "truncate_prompt_tokens",
    "add_special_tokens", "add_generation_prompt", "continue_final_message", "truncation_side", "messages",
    "prompt", "input", "tools", "system", "instructions", "reasoning_effort", "chat_template_kwargs",
    "documents", "thinking", "output_config", "truncation", "best_of", "temperature", "unheard_of",
]  # fmt: skip


def accepted(models: list[type[BaseModel]], body: bytes) -> list[dict[str, Any]]:
    """What the engine reads of a body; empty if it rejects it."""
    found = []
    for model in models:
        with contextlib.suppress(ValidationError):
            found.append(model.model_validate(json.loads(body)).model_dump(by_alias=True))
    return found


def is_read_alike(read: Mapping[str, Any], asked: CompletionRequest, route: str) -> bool:
    """Whether the router has read what an engine has read."""
    # `stream` is no field of an embedding's model: there it is what the client sent.
    stream = asked.stream if route == "/v1/embeddings" else bool(read.get("stream"))
    wanted: dict[str, Any] = {"stream": stream, "model": read.get("model") or None}
    had: dict[str, Any] = {"stream": asked.stream, "model": asked.model or None}
    if route in {"/v1/chat/completions", "/v1/completions"}:
        wanted |= {
            "n": max(1, min(2**31 - 1, read.get("n") or 1)),
            "priority": max(-(2**31), min(2**31 - 1, read.get("priority") or 0)),
            "session_id": read.get("session_id") or None,
        }
        had |= {"n": min(2**31 - 1, asked.n), "priority": asked.priority, "session_id": asked.session_id}
        if isinstance(read.get("use_beam_search"), bool):
            wanted["beams"], had["beams"] = read["use_beam_search"], asked.is_beam_search
    if isinstance(asked, responses.ResponseRequest):
        wanted |= {"is_kept": read.get("store") is not False, "before": read.get("previous_response_id")}
        had |= {"is_kept": asked.is_kept, "before": asked.previous_id}
    return wanted == had


@pytest.mark.parametrize(("engine", "route"), list(MODELS), ids=" ".join)
@given(given=st.dictionaries(st.sampled_from(READ), SPELLED, max_size=5))
@example(given={"n": 1.0, "stream": "on"})
@example(given={"use_beam_search": "FALSE", "echo": "off", "logprobs": 1})
@example(given={"stream": "f", "n": " 1_000 ", "priority": 1e2})
def test_never_stricter(engine: str, route: str, given: dict[str, Any]) -> None:
    """No body is refused for a field, and one that the engine accepts is read as the engine reads it."""
    models = MODELS[engine, route]
    needed = {name for model in models for name, field in model.model_fields.items() if field.is_required()}
    filled = {
        name: value for name, value in FILLED.items() if f"{name}_" in needed and "messages" not in given
    }
    fields = filled | given
    for name in ("messages", "prompt"):  # an empty one is an error of the client's at every engine
        fields[name] = fields.get(name) or FILLED[name]
    body = json.dumps(fields).encode()

    asked = PARSERS[route](body)

    read = accepted(models, body)
    assert not read or any(is_read_alike(one, asked, route) for one in read)


@needs_long("needs the engines' wheels, unpacked")
def test_recorded() -> None:
    """The recorded fields equal those in the wheels of KVROUTER_ENGINE_WHEELS, with vllm/ and sglang/."""
    folder = os.environ.get("KVROUTER_ENGINE_WHEELS")
    if folder is None:
        pytest.skip("KVROUTER_ENGINE_WHEELS is not set")
    folders = {engine: Path(folder) / engine for engine in ("vllm", "sglang")}

    assert engine_requests.RECORDED.read_text() == engine_requests.record(folders)
