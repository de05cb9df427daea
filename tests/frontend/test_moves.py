"""Streams that go on at another worker: the client sees one answer, wherever the first worker was cut."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvrouter.relay.seam import RECORD_BYTES
from kvrouter.relay.streams import Streams
from tests.frontend.clients import Response, connected
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.tiny_engine import dying, engine, save_tokenizer, whole_of
from tests.frontend.workers import Received, Script, answer, chunk, event, in_turn, says, until

ID = "x-request-id: one"
PROMPT = "Tell me"
BODY: Any = {"model": "m", "prompt": PROMPT, "max_tokens": 40, "stream": True, "temperature": 0}
BODY |= {"stream_options": {"include_usage": True}}
CHAT = {name: value for name, value in BODY.items() if name != "prompt"}
CHAT |= {"messages": [{"role": "user", "content": PROMPT}]}
BODIES = {"/v1/completions": BODY, "/v1/chat/completions": CHAT}
VLLM: Any = {"engine": "vllm", "engine_version": "0.33.0"}
COMPLETIONS, CHATS = BODIES
# One prompt is sent again and again to workers that die: without this it would be suspected.
FLAGS = "--migration-limit=1", "--deadly-prompt-ttl-s=0"


class Parts(NamedTuple):
    """What a client reads of a stream, and what it must not read twice."""

    about: set[Any]
    text: str
    ids: list[int]
    reasons: list[str]
    usage: list[Any]
    roles: int
    errors: list[Any]
    ends: int
    is_whole: bool


def parts(got: Response) -> Parts:
    choices = [choice for one in got.events for choice in one.get("choices", ())]
    deltas = [choice.get("delta", {}) for choice in choices]
    return Parts(
        {(one["id"], one["created"], one["model"], one["object"]) for one in got.events if "id" in one},
        "".join([choice.get("text") or choice.get("delta", {}).get("content") or "" for choice in choices]),
        [token for choice in choices for token in choice.get("token_ids") or ()],
        [choice["finish_reason"] for choice in choices if choice["finish_reason"]],
        [one["usage"] for one in got.events if one.get("usage")],
        sum("role" in delta for delta in deltas),
        [one["error"] for one in got.events if "error" in one],
        got.body.count(b"[DONE]"),
        got.is_whole,
    )


def sent_by(path: str, **more: Any) -> bytes:
    """The bytes of an answer of the first worker."""
    body = BODIES[path] | {"return_token_ids": True} | more
    return whole_of(Received(f"POST {path} HTTP/1.1\r\n{ID}".encode(), json.dumps(body).encode()), 1)


def after(path: str, events: int) -> int:
    """Where so many events of that answer have ended."""
    data, at = sent_by(path), 0
    for _ in range(events):
        at = data.index(b"\n\n\r\n", at) + 4
    return at


def cuts(path: str) -> list[int]:
    """Around each end of an event, and places within events."""
    data = sent_by(path)
    ends = [
        after(path, count) + near for count in range(4, data.count(b"\n\n\r\n")) for near in (-4, -2, 0, 1)
    ]
    return sorted({*range(after(path, 4), len(data), 211), *ends})


async def whole(fleet: Fleet, path: str, **more: Any) -> Parts:
    """The answer without a death."""
    for worker in fleet.workers:
        worker.script = engine(1)
    return parts(await fleet.ask(BODIES[path] | more, ID, path=path))


async def moved(fleet: Fleet, path: str, *scripts: Script, **more: Any) -> Response:
    """The answer of workers that follow these scripts in turn."""
    turns = in_turn(*scripts)
    for worker in fleet.workers:
        worker.script = turns
    return await fleet.ask(BODIES[path] | more, ID, path=path)


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> str:
    """A flag."""
    return f"--model-path={save_tokenizer(tmp_path / 'm')}"


TWO = (engine(1), engine(2))


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("piece", [1 << 20, 97, 0], ids=["one read", "parts of events", "one event a read"])
async def test_every_cut(
    fleet_of: FleetOf, with_tokenizer: str, path: str, piece: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the worker dies, also amid a character; C passes on what comes as one event a read."""
    records, add = list[int](), Streams.add

    def counted(self: Streams, worker: Any, client: int, returned: Any, most: int = 0) -> Any:
        records.append(most)
        return add(self, worker, client, returned, most)

    monkeypatch.setattr(Streams, "add", counted)
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        assert (want.reasons, want.roles, want.ends) == (["length"], int(path == CHATS), 1)
        assert len(want.ids) == 40
        for at in cuts(path):
            got = await moved(fleet, path, dying(1, at, piece=piece), engine(2))
            assert parts(got) == want, (at, got.body[-900:])
        assert set(records) == ({RECORD_BYTES} if piece == 0 and Streams().is_native else set())
        metrics = (await fleet.get("/metrics")).body.decode()
        assert f'kvrouter_migrations_total{{cause="lost",result="moved"}} {len(cuts(path))}' in metrics


ENDS = {
    "abort": chunk(event("", "abort")),
    "a text and abort in one read": chunk(event("no", "abort")),
    "error": chunk(b'data: {"error": {"message": "broken", "code": 500}}\n\n'),
    "the end of the body": b"0\r\n\r\n",
}


@pytest.mark.parametrize("ends", ENDS)
@pytest.mark.parametrize("path", BODIES)
async def test_ended_by_its_worker(fleet_of: FleetOf, with_tokenizer: str, path: str, ends: str) -> None:
    """An engine gives up amid an answer: the client hears nothing of it."""
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        script = dying(1, events=9, last=ENDS[ends])
        assert parts(await moved(fleet, path, script, engine(2))) == want


async def test_silent_worker(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """The stream leaves an engine that has sent nothing for --idle-timeout-s."""
    async with fleet_of(*FLAGS, with_tokenizer, "--idle-timeout-s=0.3", scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, CHATS)
        got = await moved(fleet, CHATS, dying(1, events=9, stalls=True), engine(2))
        assert parts(got) == want


@pytest.mark.parametrize("path", BODIES)
async def test_without_chunks(fleet_of: FleetOf, with_tokenizer: str, path: str) -> None:
    """Workers that end a body by closing, and a client that speaks HTTP/1.0."""
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        script = dying(1, 3000, is_chunked=False)
        assert parts(await moved(fleet, path, script, engine(2, is_chunked=False))) == want
        turns = in_turn(dying(1, events=9), engine(2))
        for worker in fleet.workers:
            worker.script = turns
        async with connected(fleet.url) as client:
            client.send(BODIES[path], ID, path=path, version="HTTP/1.0")
            assert parts(await client.response()) == want._replace(is_whole=True)


@pytest.mark.parametrize("path", BODIES)
async def test_several_moves(fleet_of: FleetOf, with_tokenizer: str, path: str) -> None:
    """The second worker dies as well. With a move more the answer is whole, else it ends with an error."""
    for limit in (1, 2):
        flags = f"--migration-limit={limit}", FLAGS[1], with_tokenizer
        async with fleet_of(*flags, scripts=(*TWO, engine(3)), **VLLM) as fleet:
            want = await whole(fleet, path)
            got = parts(await moved(fleet, path, dying(1, events=9), dying(2, events=9), engine(3)))
            if limit == 2:
                assert got == want
            else:
                assert got.errors
                assert want.text.startswith(got.text)
                assert (got.reasons, got.ends) == ([], 0)


async def test_error_of_the_client(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """An error that tells the client is the end: nothing follows it."""
    error = chunk(b'data: {"error": {"message": "too long", "code": 400}}\n\n')
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        got = parts(await moved(fleet, CHATS, dying(1, events=9, last=error), engine(2)))
        assert got.errors[0]["message"] == "too long"
        assert (got.reasons, got.ends) == ([], 0)
        assert len(fleet.requests) == 1


FAILING: dict[str, Script] = {
    "400": says(answer(b'{"error":{"message":"too long"}}', 400)),
    "503": says(answer(b'{"error":{}}', 503)),
    "no stream": says(answer()),
}


@pytest.mark.parametrize("name", FAILING)
async def test_failed_move(fleet_of: FleetOf, with_tokenizer: str, name: str) -> None:
    """No worker goes on: the client gets one error event, and the connection stays usable."""
    async with fleet_of(*FLAGS, "--retries=0", with_tokenizer, scripts=TWO, **VLLM) as fleet:
        got = parts(await moved(fleet, CHATS, dying(1, events=9), FAILING[name]))
        assert got.is_whole
        assert len(got.errors) == 1, got


REFUSED: dict[str, Any] = {
    "several answers": {"n": 2},
    "beam search": {"use_beam_search": True},
    "echo": {"echo": True},
    "logprobs": {"logprobs": 1},
    "a frequency penalty": {"frequency_penalty": 0.5},
    "a presence penalty": {"presence_penalty": -1},
    "JSON": {"response_format": {"type": "json_object"}},
    "a grammar": {"structured_outputs": {"choice": ["a"]}},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "a seed": {"seed": 1, "temperature": 0.5},
    "a field that is not known": {"whatever": 1},
    "a stop string, without a tokenizer": {"stop": ["X"]},
}


@pytest.mark.parametrize("name", REFUSED)
async def test_refused(fleet_of: FleetOf, name: str) -> None:
    """What cannot be continued exactly ends with the error event of --migration-limit 0."""
    seen = []
    for limit in (0, 1):
        async with fleet_of(f"--migration-limit={limit}", FLAGS[1], scripts=TWO, **VLLM) as fleet:
            got = await moved(fleet, CHATS, dying(1, events=8), engine(2), **REFUSED[name])
            seen.append(parts(got))
            assert len(fleet.requests) == 1
    before, now = seen
    assert now.errors == before.errors != []
    if name != "a stop string, without a tokenizer":  # that one is only known when it breaks off
        assert now == before


async def test_engines_that_show_no_ids(fleet_of: FleetOf) -> None:
    """The bodies for SGLang's chats and for unknown engines stay as they are."""
    cases = ("sglang", CHATS, False), ("sglang", COMPLETIONS, True), ("x", CHATS, False)
    for name, path, shows in cases:
        async with fleet_of(*FLAGS, scripts=TWO[:1], engine=name, engine_version="0.5.23") as fleet:
            await fleet.ask(BODIES[path], ID, path=path)
            assert ("return_token_ids" in fleet.workers[0].requests[0].json) == shows


async def test_strip(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """With --migration-strip the client gets no token ids that it did not ask for, before and after."""
    async with fleet_of(*FLAGS, "--migration-strip", with_tokenizer, scripts=TWO, **VLLM) as fleet:
        for path in BODIES:
            want = await whole(fleet, path)
            got = await moved(fleet, path, dying(1, events=9), engine(2))
            assert parts(got) == want
            assert want.ids == []
            assert b"token_ids" not in got.body
            asked = await moved(fleet, path, dying(1, events=9), engine(2), return_token_ids=True)
            assert len(parts(asked).ids) == 40


async def test_inexact(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """--migration-inexact moves a sampled stream with a seed."""
    more = {"seed": 1, "temperature": 0.5}
    async with fleet_of(*FLAGS, "--migration-inexact", with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, CHATS, **more)
        assert parts(await moved(fleet, CHATS, dying(1, events=9), engine(2), **more)) == want


async def test_half_a_character_without_a_tokenizer(fleet_of: FleetOf) -> None:
    """Without a tokenizer a stream moves unless its last character is not complete."""
    async with fleet_of(*FLAGS, scripts=TWO, **VLLM) as fleet:
        want, seen = await whole(fleet, COMPLETIONS), set()
        for events in range(4, 40):
            got = parts(await moved(fleet, COMPLETIONS, dying(1, events=events), engine(2)))
            assert got == want or (got.errors and want.text.startswith(got.text)), events
            seen.add(got == want)
        assert seen == {True, False}


async def test_what_the_next_worker_is_asked(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """Ids of prompt and answer as the prompt, and what is left of the limits."""
    async with fleet_of(*FLAGS, with_tokenizer, "--access-log=all", scripts=TWO, **VLLM) as fleet:
        more = {"min_tokens": 12, "top_p": 0.5, "user": "u", "max_completion_tokens": 30}
        await moved(fleet, CHATS, dying(1, events=9), engine(2), **more)
        (second,) = [
            one for worker in fleet.workers for one in worker.requests if b"messages" not in one.body
        ]
        asked = second.json
        assert second.head.startswith(b"POST /v1/completions HTTP/1.1")
        assert bytes(asked["prompt"][:7]) == PROMPT.encode()
        assert len(asked["prompt"]) == 7 + 8
        assert (asked["max_tokens"], asked["min_tokens"]) == (22, 4)
        assert (asked["top_p"], asked["user"], asked["stream"]) == (0.5, "u", True)
        assert "messages" not in asked
        await until(lambda: not fleet.bookings(), "both bookings are freed")
        assert [entry["reason"] for entry in fleet.logged("stream.moved")]
        await until(lambda: fleet.logged("request.served"), "the line of the access log")
        (line,) = fleet.logged("request.served")
        assert (line["moves"], line["retries"]) == (1, 1)
        (client,) = (await fleet.get("/clients")).json["clients"]
        assert client["now"]["output_tokens"] == 30


async def test_no_tokens_left(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """Every token has arrived, but not the end: the replica writes it."""
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        for path in BODIES:
            want = await whole(fleet, path)
            data = sent_by(path)
            last = data.index(b'"finish_reason": "length"')
            start = data.rindex(b"\r\n", 0, data.rindex(b"data:", 0, last))
            cut = data.rindex(b"\n\n\r\n", 0, start) + 4
            got = parts(await moved(fleet, path, dying(1, cut), engine(2)))
            assert got == want
            more = {"max_tokens": 39}
            short = await whole(fleet, path, **more)
            shorter = sent_by(path, **more)
            end = shorter.index(b"\n\n\r\n", shorter.index(b'"finish_reason": "length"')) + 4
            got = parts(await moved(fleet, path, dying(1, end), engine(2), **more))
            assert got == short
            assert len(fleet.requests) >= 2
