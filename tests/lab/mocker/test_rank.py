"""An engine in real time."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest

from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import Engine, EngineConfig, EngineOutput, EngineRequest, StepResult
from kvrouter.lab.mocker.hashing import token_ids
from kvrouter.lab.mocker.rank import Mailbox, Rank
from tests.frontend.workers import turns


def request(name: str, max_tokens: int = 3) -> EngineRequest:
    """A short prompt."""
    return EngineRequest(name, token_ids(range(20)), max_tokens)


async def read(mailbox: Mailbox) -> list[EngineOutput]:
    """Everything up to the first end."""
    outputs = await mailbox.take()
    while outputs[-1].finish_reason is None:
        outputs += await mailbox.take()
    return outputs


@pytest.fixture
async def rank() -> AsyncIterator[Rank]:
    """A rank a thousand times as fast as its GPU."""
    async with Rank.open(MockerConfig(speedup=1000), EngineConfig(), 0) as rank:
        yield rank


async def test_outputs_come_into_the_mailbox(rank: Rank) -> None:
    """A request runs until its end."""
    with rank.serving([request("a")]) as mailbox:
        outputs = await read(mailbox)

    assert [None, None, "length"] == [output.finish_reason for output in outputs]


async def test_events_are_published_before_the_answer(rank: Rank) -> None:
    """When a client has the first token, the replay already has the prompt's blocks."""
    with rank.serving([request("a")]) as mailbox:
        await mailbox.take()

        assert 1 == len(rank.publisher._buffer)


async def test_leaving_early_aborts(rank: Rank) -> None:
    """A reader that leaves early leaves no request in the engine."""
    with rank.serving([request("a", 1000), request("b", 1000)]) as mailbox:
        await mailbox.take()

    assert (0, 0.0) == (rank.num_unfinished, rank.engine.kv_usage)


async def test_shut_down(rank: Rank) -> None:
    """Running requests, and new ones, end with "abort"."""
    with rank.serving([request("a", 1000)]) as before:
        rank.shut_down()
        with rank.serving([request("b")]) as after:
            reasons = [(await read(mailbox))[-1].finish_reason for mailbox in (before, after)]

    assert ["abort", "abort"] == reasons


async def test_idle_rank_waits(rank: Rank) -> None:
    """Without work no timer runs: an idle engine costs nothing."""
    with rank.serving([request("a")]) as mailbox:
        await read(mailbox)
    await turns(100)

    assert 3 == rank.engine.counters.steps


async def test_failed_engine_ends_its_requests(monkeypatch: pytest.MonkeyPatch) -> None:
    """Requests of a failed engine end, and the error is raised when the rank closes."""

    def fail(_: Engine) -> StepResult:
        raise ZeroDivisionError

    monkeypatch.setattr(Engine, "step", fail)
    with pytest.raises(ZeroDivisionError):  # noqa: PT012 - it is raised where the block ends
        async with Rank.open(MockerConfig(), EngineConfig(), 0) as rank:
            with rank.serving([request("a")]) as mailbox:
                (output,) = await mailbox.take()

    assert "abort" == output.finish_reason
