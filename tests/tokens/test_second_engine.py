"""A question for token ids goes to a second engine: scripted engines on real sockets."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator

import pytest

from kvrouter.tokens import remote_tokenizer
from kvrouter.tokens.remote_tokenizer import (
    TOKENIZE,
    BusyError,
    EngineTokenizer,
    EngineTokenizerError,
    PromptRejectedError,
    SlowError,
)
from kvrouter.tokens.second_engine import LEAST_S, Question, ask_in_turn
from tests.frontend.workers import (
    FakeWorker,
    Received,
    Script,
    Wire,
    answer,
    says,
    says_and_closes,
    says_and_resets,
    says_and_stalls,
)

IDS = b'{"tokens":[7,8]}'
GOOD = says(answer(IDS))
BODIES = [b'{"prompt":"a"}']
PARTS = answer(IDS)
LONG_S = 60.0
"""A limit that no test reaches."""

FAILS: dict[str, Script | None] = {
    "refuses the connection": None,
    "closes": says_and_closes(),
    "resets": says_and_resets(),
    "dies in the head": says_and_resets(PARTS[:20]),
    "dies in the body": says_and_resets(PARTS[:-5]),
    "closes in the body": says_and_closes(PARTS[:-5]),
    **{str(status): says(answer(b"{}", status)) for status in (401, 403, 404, 405, 408, 429, 500, 501, 503)},
    "unknown model": says(answer(b"The model `m` does not exist", 404)),
    "html": says(answer(b"<html>")),
    "words": says(answer(b'{"tokens":["a"]}')),
    "negative": says(answer(b'{"tokens":[-1]}')),
    "no field": says(answer(b"{}")),
    "no token": says(answer(b'{"tokens":[]}')),
    "no HTTP": says_and_closes(b"\x00\xff\r\n\r\n"),
    "endless": says(answer(b'{"tokens":[%b7]}' % (b"7," * 100_000))),
}
HANGS = {"silent": says_and_stalls(), "stuck in the head": says_and_stalls(PARTS[:20])} | {
    "stuck in the body": says_and_stalls(PARTS[:-5])
}


def closed_url() -> str:
    """An address where nothing listens."""
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return f"http://127.0.0.1:{sock.getsockname()[1]}"


@contextlib.asynccontextmanager
async def two_engines(*scripts: Script | None) -> AsyncIterator[list[FakeWorker]]:
    """Engines that answer by script; None: nothing listens."""
    async with contextlib.AsyncExitStack() as stack:
        workers = [FakeWorker(str(place), script or GOOD) for place, script in enumerate(scripts)]
        for worker, script in zip(workers, scripts, strict=True):
            if script is None:
                worker.url = closed_url()
            else:
                await stack.enter_async_context(worker.serving())
        yield workers


async def ask(
    workers: list[FakeWorker], late_s: float = LONG_S, limit_s: float = LONG_S, bodies: list[bytes] = BODIES
) -> Question:
    """Ask these engines in this order."""
    urls = [worker.url for worker in workers]
    async with EngineTokenizer.open() as engines:
        return await ask_in_turn(engines, urls, bodies, route=TOKENIZE, late_s=late_s, limit_s=limit_s)


def counts(workers: list[FakeWorker]) -> list[int]:
    """The requests that each got."""
    return [len(worker.requests) for worker in workers]


async def test_one_is_enough() -> None:
    """If the first engine answers, the second one gets no question."""
    async with two_engines(GOOD, GOOD) as workers:
        asked = await ask(workers)

        assert ([[7, 8]], workers[0].url, {}) == (asked.found, asked.answered, asked.errors)
        assert [1, 0] == counts(workers)


@pytest.mark.parametrize("script", FAILS.values(), ids=FAILS.keys())
async def test_the_first_fails(script: Script | None) -> None:
    """The ids come from the second engine at once, and the error of the first is kept."""
    async with two_engines(script, GOOD) as workers:
        asked = await ask(workers)

        assert [[7, 8]] == asked.found
        assert (workers[1].url, [workers[0].url]) == (asked.answered, list(asked.errors))
        assert not isinstance(asked.errors[workers[0].url], SlowError | PromptRejectedError)


@pytest.mark.parametrize("script", HANGS.values(), ids=HANGS.keys())
async def test_the_first_hangs(script: Script) -> None:
    """After `late_s` the second engine is asked, too; the late call ends with its answer."""
    async with two_engines(script, GOOD) as workers:
        asked = await ask(workers, late_s=0.01)

        assert (workers[1].url, [[7, 8]]) == (asked.answered, asked.found)
        assert isinstance(asked.errors[workers[0].url], SlowError)


async def test_the_first_is_late_and_the_second_fails() -> None:
    """An engine that was late may still answer."""
    is_asked = asyncio.Event()

    async def late(received: Received, wire: Wire) -> None:
        await is_asked.wait()
        await GOOD(received, wire)

    async def fails(received: Received, wire: Wire) -> None:
        await says(answer(b"{}", 500))(received, wire)
        is_asked.set()

    async with two_engines(late, fails) as workers:
        asked = await ask(workers, late_s=0.01)

        assert (workers[0].url, [workers[1].url]) == (asked.answered, list(asked.errors))


@pytest.mark.parametrize("status", [400, 413, 422])
async def test_rejected_prompts(status: int) -> None:
    """No other engine is asked about a prompt that one has rejected."""
    async with two_engines(says(answer(b"too long", status)), GOOD) as workers:
        asked = await ask(workers)

        assert asked.found is None
        assert isinstance(asked.errors[workers[0].url], PromptRejectedError)
        assert [1, 0] == counts(workers)


@pytest.mark.parametrize("second", [*FAILS.values(), *HANGS.values()], ids=[*FAILS, *HANGS])
async def test_both_are_wrong(second: Script | None) -> None:
    """There is no third engine, and the limit is for both."""
    async with two_engines(says(answer(b"{}", 503)), second, GOOD) as workers:
        asked = await ask(workers, limit_s=1.0 if second in HANGS.values() else LONG_S)

        assert (None, "") == (asked.found, asked.answered)
        assert [worker.url for worker in workers[:2]] == list(asked.errors)
        assert 0 == counts(workers)[2]


async def test_both_hang() -> None:
    """Two engines that hang cost no more time than one."""
    async with two_engines(*HANGS.values()) as workers:
        asked = await ask(workers[:2], late_s=0.05, limit_s=0.2)

        assert asked.found is None
        assert all(isinstance(error, SlowError) for error in asked.errors.values())


async def test_no_time_is_left() -> None:
    """An engine that uses up the limit is the only one that is asked."""
    async with two_engines(says_and_stalls(), GOOD) as workers:
        asked = await ask(workers, late_s=LONG_S, limit_s=LEAST_S)

        assert asked.found is None
        assert 0 == counts(workers)[1]


async def test_several_bodies() -> None:
    """The ids of all bodies come from one engine."""
    async with two_engines(says(answer(b"{}", 500)), GOOD) as workers:
        asked = await ask(workers, bodies=BODIES * 3)

        assert [[7, 8]] * 3 == asked.found
        assert 3 == counts(workers)[1]


async def test_busy(monkeypatch: pytest.MonkeyPatch) -> None:
    """Too many calls of this replica are no failure of an engine."""
    monkeypatch.setattr(remote_tokenizer, "MOST_CALLS", 0)
    async with two_engines(GOOD, GOOD) as workers:
        asked = await ask(workers)

        assert {BusyError} == {type(error) for error in asked.errors.values()}
        assert [0, 0] == counts(workers)


async def test_one_engine() -> None:
    """A fleet of one engine has no second one."""
    async with two_engines(says(answer(b"{}", 500))) as workers:
        asked = await ask(workers)

        assert [EngineTokenizerError] == [type(error) for error in asked.errors.values()]
