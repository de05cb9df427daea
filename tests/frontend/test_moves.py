"""Streams that go on at another worker: the client sees one answer, wherever the first worker was cut."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from kvrouter.frontend.requests.moves import MOST_BODY_BYTES
from kvrouter.relay import streams
from kvrouter.relay.seam import RECORD_BYTES
from kvrouter.relay.streams import Streams
from tests.frontend.clients import Response, ask, connected
from tests.frontend.fleet import Fleet, FleetOf, use_of
from tests.frontend.test_keys import Ring, ring
from tests.frontend.test_pairs import ALWAYS, HANDED, pair
from tests.frontend.tiny_engine import dying, engine, events_of, save_tokenizer, whole_of
from tests.frontend.workers import (
    LAST_CHUNK,
    OK,
    SSE_HEAD,
    Received,
    Script,
    Wire,
    answer,
    chunk,
    event,
    in_turn,
    says,
    until,
)
from tests.long import IS_LONG

__all__ = ["ring"]
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
SYNC = "--router-replica-sync"
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


def sent_by(path: str, *, is_chunked: bool = True, **more: Any) -> bytes:
    """The bytes of an answer of the first worker."""
    body = BODIES[path] | {"return_token_ids": True} | more
    received = Received(f"POST {path} HTTP/1.1\r\n{ID}".encode(), json.dumps(body).encode())
    return whole_of(received, 1, is_chunked=is_chunked)


def cuts(path: str, *, is_chunked: bool) -> list[int]:
    """Around each end of an event but the last, and places within events.

    Without chunks only before the last token: an orderly end after it is a good one.
    """
    data = sent_by(path, is_chunked=is_chunked)
    last = len(data) if is_chunked else data.index(b'"finish_reason":"length"')
    ends = [end.end() for end in re.finditer(rb"\n\n(\r\n)?", data)][3:-1]
    places = {*range(ends[0], last, 211), *[end + near for end in ends for near in (-4, -2, 0, 1)]}
    return sorted([at for at in places if at < last])


async def whole(fleet: Fleet, path: str, **more: Any) -> Parts:
    """The answer without a death."""
    for worker in fleet.workers:
        worker.script = engine(1)
    return parts(await fleet.ask(BODIES[path] | more, ID, path=path))


async def moved(
    fleet: Fleet, path: str, *scripts: Script, version: str = "HTTP/1.1", **more: Any
) -> Response:
    """The answer of workers that follow these scripts in turn."""
    turns = in_turn(*scripts)
    for worker in fleet.workers:
        worker.script = turns
    async with connected(fleet.url) as client:
        client.send(BODIES[path] | more, ID, path=path, version=version)
        return await client.response()


@pytest.fixture
def with_tokenizer(tmp_path: Path) -> str:
    """A flag."""
    return f"--model-path={save_tokenizer(tmp_path / 'm')}"


@pytest.fixture(params=[True, False], ids=["C", "Python"])
def passes_on(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who passes on what follows the first chunks."""
    if not request.param:
        monkeypatch.setattr(streams, "native", None)


TWO = (engine(1), engine(2))


class Way(NamedTuple):
    """How the first worker's bytes come, and whose version the client speaks."""

    piece: int = 0
    is_chunked: bool = True
    version: str = "HTTP/1.1"
    is_native: bool = False
    step: int = 1
    first: int = 0

    @property
    def cuts(self) -> slice:
        """The short form takes fewer: an odd step comes to each of the four places around an event's end."""
        return slice(None, None, self.step if IS_LONG else self.step + 4)


WAYS = {
    "one read": Way(1 << 20),
    "parts of events": Way(97),
    "one event a read, in C": Way(is_native=True),
    "amid an event at first, in C": Way(is_native=True, step=3, first=700),
    "one event a read, in Python": Way(step=3),  # around each end of an event are four
    "without chunks": Way(is_chunked=False, step=3),
    "HTTP/1.0": Way(version="HTTP/1.0", step=3),
}


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.parametrize("name", WAYS)
async def test_every_cut(
    fleet_of: FleetOf, with_tokenizer: str, path: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Wherever the worker dies, also amid a character, each event is that of an answer without a death."""
    way, records, add = WAYS[name], list[int](), Streams.add
    if not way.is_native:
        monkeypatch.setattr(streams, "native", None)

    def counted(self: Streams, worker: Any, client: int, returned: Any, most: int = 0) -> Any:
        records.append(most)
        return add(self, worker, client, returned, most)

    monkeypatch.setattr(Streams, "add", counted)
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        answer = await moved(fleet, path, engine(1))
        want = parts(answer)
        assert (want.reasons, want.roles, want.ends) == (["length"], int(path == CHATS), 1)
        assert len(want.ids) == 40
        at_all = cuts(path, is_chunked=way.is_chunked)[way.cuts]
        for at in at_all:
            first = dying(1, at, piece=way.piece, first=way.first, is_chunked=way.is_chunked)
            got = await moved(fleet, path, first, engine(2), version=way.version)
            assert parts(got) == want, (at, got.body[-900:])
            assert got.events == answer.events
        assert set(records) == ({RECORD_BYTES} if way.is_native and Streams().is_native else set())
        metrics = (await fleet.get("/metrics")).body.decode()
        cause = "lost" if way.is_chunked else "failed"
        assert f'kvrouter_migrations_total{{cause="{cause}",result="moved"}} {len(at_all)}' in metrics


ENDS = {
    "abort": chunk(event("", "abort")),
    "a text and abort in one read": chunk(event("no", "abort")),
    "error": chunk(b'data: {"error": {"message": "broken", "code": 500}}\n\n'),
    "error in capitals": chunk(event("", "ERROR")),
    "an event that is named error": chunk(b'event: error\ndata: {"message": "broken"}\n\n'),
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
    """Both workers end a body by closing."""
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        for version in ("HTTP/1.1", "HTTP/1.0"):
            head = sent_by(path, is_chunked=False).index(b"\r\n\r\n")
            for at in (3000, *range(head + 150, head + 1200, 170)):  # also amid the first output
                script = dying(1, at, is_chunked=False)
                second = engine(2, is_chunked=False)
                got = parts(await moved(fleet, path, script, second, version=version))
                assert (len(got.about), *got[1:]) == (1, *want[1:]), at  # without output it is a retry


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


def odd(
    place: Callable[[list[bytes]], Iterable[bytes]], *, dies: bool = True, created: int = 1, together: int = 1
) -> Script:
    """An engine whose answer is sent in chunks of its own, from its events; so many of them in one write."""

    async def script(received: Received, wire: Wire) -> None:
        chunks = [*map(chunk, place(list(events_of(received, created))))]
        await wire.send(
            SSE_HEAD, *[b"".join(chunks[at : at + together]) for at in range(0, len(chunks), together)]
        )
        if dies:
            wire.reset()
        else:
            await wire.send(LAST_CHUNK)

    return script


ODD: dict[str, tuple[str, Callable[[list[bytes]], Iterable[bytes]]]] = {
    "a line end as a chunk": (COMPLETIONS, lambda events: [*events[:9], events[9][:-2], b"\n"]),
    "CRLF as a chunk": (COMPLETIONS, lambda events: [*events[:9], events[9][:-2], b"\r\n"]),
    "empty lines with CRLF": (COMPLETIONS, lambda events: [one[:-1] + b"\r\n" for one in events[:9]]),
    "a comment before the first token": (CHATS, lambda events: [events[0], b": hi\n\n", *events[1:9]]),
}


ERROR = b'data: {"error": {"message": "broken", "code": 500}}\n\n'
TOGETHER: dict[str, Callable[[list[bytes]], Iterable[bytes]]] = {
    "events": lambda events: events[:14],
    "parts of events": lambda events: [*events[:6], events[6][:30], events[6][30:], events[7], events[8][:9]],
    "an error": lambda events: [*events[:7], ERROR, events[7]],
    "parts of an error": lambda events: [*events[:7], ERROR[:10], ERROR[10:]],
    "parts of an error behind empty lines": lambda events: [
        *events[:6],
        b"\r\n".join(events[6:9]),
        ERROR[:10],
        ERROR[10:],
    ],
    "parts of the first event": lambda events: [events[0][:40], events[0][40:], *events[1:9]],
}


@pytest.mark.parametrize("case", TOGETHER)
@pytest.mark.parametrize("path", BODIES)
@pytest.mark.usefixtures("passes_on")
async def test_several_chunks_a_read(fleet_of: FleetOf, with_tokenizer: str, case: str, path: str) -> None:
    """Reads of several chunks pass as they are where each chunk is an event, and C takes over after a few."""
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        for together in (2, 3, 5):
            got = await moved(fleet, path, odd(TOGETHER[case], together=together), engine(2))
            assert parts(got) == want, together


@pytest.mark.parametrize("path", BODIES)
@pytest.mark.usefixtures("passes_on")
async def test_cut_before_the_first_output(fleet_of: FleetOf, with_tokenizer: str, path: str) -> None:
    """The first read ends anywhere, also within the line with the size of a chunk."""
    data = sent_by(path)
    ends = [data.index(b"\r\n\r\n") + 4, *[found.end() for found in re.finditer(rb"\n\n\r\n", data)]]
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        for at in [end + near for end in ends[:4] for near in range(-4, 6)]:
            next_end = min(end for end in ends if end > at + 6)

            async def script(received: Received, wire: Wire, at: int = at, end: int = next_end) -> None:
                sent = whole_of(received, 1)
                await wire.send(sent[:at], sent[at:end], sent[end : end + 99], sent[end + 99 :])

            asked = len(fleet.requests)
            assert parts(await moved(fleet, path, script)) == want, at
            assert len(fleet.requests) == asked + 1, at


@pytest.mark.parametrize("case", ODD)
@pytest.mark.usefixtures("passes_on")
async def test_odd_engines(fleet_of: FleetOf, with_tokenizer: str, case: str) -> None:
    """However an engine frames its events, only whole ones reach the client, each at once."""
    path, place = ODD[case]
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, path)
        got = await moved(fleet, path, odd(place), engine(2))
        assert (want.text, want.ids, [], 1) == (
            parts(got).text,
            parts(got).ids,
            parts(got).errors,
            got.body.count(b"[DONE]"),
        )


async def test_second_worker_that_cannot_be_read(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """Its events are not left out in silence: the client gets the error event."""
    bad = odd(lambda events: [one.replace(b'"choices":[', b'"choices":[5,') for one in events], dies=False)
    async with fleet_of(*FLAGS, with_tokenizer, scripts=TWO, **VLLM) as fleet:
        got = parts(await moved(fleet, COMPLETIONS, dying(1, events=5), bad))
        assert ([], 0) == (got.reasons, got.ends)
        assert "cannot be read" in got.errors[0]["message"]


async def test_event_that_is_too_long(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """It passes as it is, whatever it names."""
    long = b'data: {"error": null, "x": "%b"}\n\n' % (b"y" * 5_000_000)
    healthy = odd(lambda events: [*events[:9], long, *events[9:]], dies=False)
    async with fleet_of(*FLAGS, with_tokenizer, scripts=(healthy,), **VLLM) as fleet:
        got = await fleet.ask(BODY, ID, path=COMPLETIONS)
        assert (5_000_000, 1) == (got.body.count(b"y" * 1000) * 1000, got.body.count(b"[DONE]"))


REFUSED: dict[str, Any] = {
    "several answers": {"n": 2},
    "beam search": {"use_beam_search": True},
    "echo": {"echo": True},
    "the best of several answers": {"best_of": 2},
    "logprobs": {"logprobs": 1},
    "logprobs of the prompt": {"prompt_logprobs": 1},
    "logprobs of the tokens alone": {"logprobs": 0},
    "a frequency penalty": {"frequency_penalty": 0.5},
    "a presence penalty": {"presence_penalty": -1},
    "JSON": {"response_format": {"type": "json_object"}},
    "a grammar": {"structured_outputs": {"choice": ["a"]}},
    "a regular expression": {"guided_regex": "a"},
    "tools": {"tools": [{"type": "function", "function": {"name": "f"}}]},
    "a seed": {"seed": 1, "temperature": 0.5},
    "a field that is not known": {"whatever": 1},
    "an image": {"messages": [{"role": "user", "content": [{"type": "image_url"}]}, *CHAT["messages"]]},
    "parameters of a hand-over": {"kv_transfer_params": {"prompt_token_ids": [1]}},
    "a long body": {"user": "u" * (MOST_BODY_BYTES + 1)},
    "a stop string, without a tokenizer": {"stop": ["X"]},
}


OF_COMPLETIONS: dict[str, Any] = {
    "several prompts": {"prompt": ["a", "b"]},
    "a suffix": {"suffix": "s"},
    "prompt embeddings": {"prompt_embeds": "e"},
}


@pytest.mark.parametrize("name", [*REFUSED, *OF_COMPLETIONS])
async def test_refused(fleet_of: FleetOf, name: str) -> None:
    """What cannot be continued exactly ends with the error event of --migration-limit 0."""
    seen = []
    for limit in (0, 1):
        async with fleet_of(f"--migration-limit={limit}", FLAGS[1], scripts=TWO, **VLLM) as fleet:
            path, more = (CHATS, REFUSED[name]) if name in REFUSED else (COMPLETIONS, OF_COMPLETIONS[name])
            got = await moved(fleet, path, dying(1, events=8), engine(2), **more)
            seen.append(parts(got))
            assert len(fleet.requests) == 1
    before, now = seen
    assert now.errors == before.errors != []
    if name != "a stop string, without a tokenizer":  # that one is only known when it breaks off
        assert now == before


async def test_engines_that_show_no_ids(fleet_of: FleetOf) -> None:
    """The bodies for SGLang's chats, and for old and unknown engines, stay as they are."""
    for name, version, path, shows in (
        ("sglang", "0.5.23", CHATS, False),
        ("sglang", "0.5.23", COMPLETIONS, True),
        ("sglang", "0.5.22", COMPLETIONS, False),
        ("vllm", "0.10.2", CHATS, True),
        ("vllm", "0.10.1", CHATS, False),
        ("x", "0.5.23", CHATS, False),
    ):
        async with fleet_of(*FLAGS, scripts=TWO[:1], engine=name, engine_version=version) as fleet:
            await fleet.ask(BODIES[path], ID, path=path)
            assert ("return_token_ids" in fleet.workers[0].requests[0].json) == shows


async def test_answers_that_stay(fleet_of: FleetOf) -> None:
    """Those of other APIs, and those that are not streamed: their bodies stay as they are."""
    messages, text = CHAT["messages"], {"input": PROMPT}
    cases = (
        ("/v1/messages", {"messages": messages, "stream": True}),
        ("/v1/responses", text | {"stream": True}),
        (CHATS, {"messages": messages}),
    )
    async with fleet_of(*FLAGS, scripts=(OK,), **VLLM) as fleet:
        for path, body in cases:
            assert 200 == (await fleet.ask({"model": "m", "max_tokens": 9} | body, path=path)).status
            assert b"return_token_ids" not in fleet.workers[0].requests[-1].body


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
    more: Any = {"seed": 1, "temperature": 0.5}
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
        more: Any = {"min_tokens": 12, "top_p": 0.5, "user": "u", "max_completion_tokens": 30}
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
            last = data.index(b'"finish_reason":"length"')
            start = data.rindex(b"\r\n", 0, data.rindex(b"data:", 0, last))
            cut = data.rindex(b"\n\n\r\n", 0, start) + 4
            got = parts(await moved(fleet, path, dying(1, cut), engine(2)))
            assert got == want
            more: Any = {"max_tokens": 39}
            short = await whole(fleet, path, **more)
            shorter = sent_by(path, **more)
            end = shorter.index(b"\n\n\r\n", shorter.index(b'"finish_reason":"length"')) + 4
            got = parts(await moved(fleet, path, dying(1, end), engine(2), **more))
            assert got == short
            assert len(fleet.requests) >= 2


def killed(fleet: Fleet, events: int, *, dies: bool = True) -> Script:
    """Sends so many events; once the client has them, its process is gone, or only the connection."""

    async def script(received: Received, wire: Wire) -> None:
        (worker,) = [one for one in fleet.workers if wire in one.wires]
        data = whole_of(received, 1)
        ends = [end.end() for end in re.finditer(rb"\n\n\r\n", data)]
        await wire.send(data[: ends[events - 1]])
        flying = [one.completions.in_flight.running for one in fleet.frontends]
        await until(lambda: any(attempt.is_committed for each in flying for attempt in each))
        end = worker.die if dies else wire.reset
        end()

    return script


async def test_prompt_that_ends_its_workers(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """What goes on with a stream counts as its prompt: two engines end, not one more with each request."""
    flags = "--migration-limit=4", with_tokenizer, SYNC
    async with fleet_of(*flags, scripts=(engine(1),) * 5, replicas=2, **VLLM) as fleet:
        for worker in fleet.workers:
            worker.script = killed(fleet, 9)
        got = parts(await fleet.ask(CHAT, ID, path=CHATS))
        assert (len(got.errors), len(fleet.requests)) == (1, 2)
        # the second replica hears of it over NATS
        await until(lambda: all(one.completions.lost.prompts.condemned for one in fleet.frontends))
        for frontend in fleet.frontends:
            refused = await ask(frontend.url, CHAT, ID, path=CHATS)
            assert refused.json["error"]["code"] == "request_ends_workers"
        assert len(fleet.requests) == 2
        for worker in fleet.workers:
            worker.script = engine(2)
        assert 200 == (await fleet.ask(CHAT | {"max_tokens": 39}, ID, path=CHATS)).status


async def test_suspected_prompt_moves(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """One engine has ended: the stream goes on once that is known, and its end acquits the prompt."""
    flags = FLAGS[0], with_tokenizer
    async with fleet_of(*flags, scripts=TWO, **VLLM) as fleet:
        want = await whole(fleet, CHATS)
        assert parts(await moved(fleet, CHATS, killed(fleet, 9), engine(2))) == want
        assert not fleet.frontend.replica.deadly.suspected


async def test_limits_of_its_tenant(fleet_of: FleetOf, ring: Ring, with_tokenizer: str) -> None:
    """Both parts count as one request, here and at a peer; so does a part with which nobody goes on."""
    limits = "--requests-per-minute=99", "--tokens-per-minute=9999", "--requests-at-once=9"
    key = ring.add("a", *limits)
    flags = *FLAGS, with_tokenizer, "--retries=0", SYNC, *ring.flags
    async with fleet_of(*flags, scripts=TWO, replicas=2, **VLLM) as fleet:

        def counted(number: int) -> list[tuple[int, int, int]]:
            uses = [use_of(one.replica) for one in fleet.frontends]
            return [(use.requests, use.tokens, use.at_once) for use in uses][:number]

        first = killed(fleet, 9, dies=False)
        turns = in_turn(first, engine(2), first, FAILING["503"])
        for worker in fleet.workers:
            worker.script = turns
        body = BODY | {"prompt": list(PROMPT.encode())}
        assert not parts(await fleet.ask(body, ID, key)).errors
        await until(lambda: counted(2) == [(1, 7 + 40, 0)] * 2, "both replicas count both parts")
        assert parts(await fleet.ask(body, ID, key)).errors
        await until(lambda: counted(1) == [(2, 7 + 40 + 7 + 9, 0)], "the part is counted")


async def test_decode_worker_of_a_pair(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """It dies: prompt and answer so far are computed by a prefill worker, and handed to the other one."""
    flags = *FLAGS, *ALWAYS, with_tokenizer
    async with pair(fleet_of, *flags, decode=(engine(1), engine(1)), **VLLM) as fleet:
        first, *decodes = fleet.workers
        want = parts(await fleet.ask(BODY, ID))
        turns = in_turn(killed(fleet, 9, dies=False), engine(2))
        for worker in decodes:
            worker.script = turns
        assert parts(await fleet.ask(BODY, ID)) == want
        assert len(first.requests) == 3
        assert not any("return_token_ids" in one.json for one in first.requests[:2])
        assert first.requests[-1].json["prompt"][:7] == list(PROMPT.encode())
        left, taken = [worker.requests[-1].json for worker in decodes]
        assert left["kv_transfer_params"] == taken["kv_transfer_params"] == HANDED
        assert left["return_token_ids"] == taken["return_token_ids"] is True


async def test_what_shows_a_move(fleet_of: FleetOf, with_tokenizer: str) -> None:
    """/decisions/REQUEST_ID has each move, and the decisions of all workers of the stream."""
    flags = "--migration-limit=2", FLAGS[1], "--router-mode=kv", with_tokenizer
    async with fleet_of(*flags, scripts=(*TWO, engine(3)), **VLLM) as fleet:
        failed = FAILING["503"]
        first, second = killed(fleet, 9, dies=False), dying(2, events=4, last=ENDS["abort"], stalls=True)
        await moved(fleet, CHATS, first, failed, second, OK)
        kept = (await fleet.get("/decisions/one")).json
        winners = [one["winner"] for one in kept["decisions"]]
        assert kept["moves"] == [
            {"from": winners[0], "to": winners[2], "cause": "lost", "tokens": 8},
            {"from": winners[2], "to": winners[3], "cause": "failed", "tokens": 12},
        ]
        text = (await fleet.get("/metrics")).body.decode()
        assert 'kvrouter_first_byte_seconds_count{model="m"} 1' in text
        other = await fleet.ask(CHAT, "x-request-id: two", path=CHATS)
        assert other.status == 200
        assert (await fleet.get("/decisions/two")).json["moves"] == []
