"""The verdict of `scripts/chaos`, and the blocks that it compares; the faults themselves need a fleet."""

from __future__ import annotations

import io
import json
import time
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from rich.console import Console

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from scripts.kit.chaos import faults
from scripts.kit.chaos.faults import ROWS
from scripts.kit.chaos.judge import Excuse, Leftovers, RowResult, judge, table
from scripts.kit.chaos.script import NO_HAPROXY, main
from scripts.kit.chaos.truth import EngineWatch, phantom_blocks
from scripts.kit.http_client import HttpError
from scripts.kit.load import LoadRequest, Outcome


def outcome(number: int, sent_at_s: float, ended_at_s: float | None, **more: Any) -> Outcome:
    """An outcome, by default a failed one."""
    facts = {"url": "a", "error": "connection lost", **more}
    return Outcome(number, sent_at_s=sent_at_s, ended_at_s=ended_at_s, **facts)


# --- which failures are to be expected ---

KILLED = Excuse("on the killed replica", at_s=10.0, url="a")


@pytest.mark.parametrize(
    ("failed", "is_expected"),
    [
        (outcome(0, 9.0, 10.1), True),
        (outcome(0, 9.0, None), True),
        (outcome(0, 9.0, 9.9), False),
        (outcome(0, 10.1, 10.2), False),
        (outcome(0, 9.0, 10.1, url="b"), False),
    ],
)
def test_killed_replica(failed: Outcome, is_expected: bool) -> None:
    """Failures are expected only for requests in flight on the killed process."""
    expected, unexpected = judge([failed], [KILLED])

    assert ({"on the killed replica": 1}, []) if is_expected else ({}, [failed]) == (expected, unexpected)


def test_killed_worker() -> None:
    """Streams that had begun may be lost; a request without its first byte may not."""
    excuse = Excuse("streaming", at_s=10.0, request_numbers=frozenset({1}))
    begun, waiting = outcome(1, 9.0, 10.1), outcome(2, 9.0, 10.1)

    assert ({"streaming": 1}, [waiting]) == judge([begun, waiting], [excuse])


def test_success_on_a_killed_process() -> None:
    """A successful request is not a failure, even on a killed process."""
    assert ({}, []) == judge([outcome(0, 9.0, 11.0, error=None)], [KILLED])


# --- rows ---

GOOD = RowResult("nats-kill", "kill -9 nats-server", requests=70, clean_after_s=0.4)


def shown(*results: RowResult) -> str:
    """The table as text."""
    console = Console(file=io.StringIO(), width=200)
    console.print(table(results))
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_promise_kept() -> None:
    """A row passes if all requests were answered, replicas agree again, and nothing is left over."""
    assert (True, []) == (GOOD.holds, GOOD.reasons())
    assert "kept" in shown(GOOD)
    assert "0.4 s" in shown(GOOD)


@pytest.mark.parametrize(
    ("more", "says"),
    [
        ({"unexpected": [outcome(0, 1.0, 2.0)]}, "1 requests failed: connection lost"),
        ({"clean_after_s": None, "unclean": ["w1 differs"]}, "not clean within 30 s: w1 differs"),
        ({"leftovers": Leftovers(bookings=2)}, "left behind: Leftovers"),
        ({"problems": ["exit code 1"]}, "exit code 1"),
    ],
)
def test_promise_broken(more: dict[str, Any], says: str) -> None:
    """Each kind of problem fails the row, and is named."""
    result = replace(GOOD, **more)

    assert not result.holds
    assert says in result.reasons()[0]
    assert "broken" in shown(result)
    assert not result.as_json()["holds"]


def test_expected_failures_keep_the_promise() -> None:
    """Unexpected failures are counted and named."""
    result = replace(GOOD, expected={"were in flight on the killed replica": 3})

    assert result.holds
    assert "3 were in flight on the killed replica" in shown(result)
    assert 3 == result.as_json()["failed"]


def test_skipped() -> None:
    """A skipped row has its reason in the table and in the file, and does not fail the run."""
    result = RowResult("rolling-restart", "rolling restart", skipped=NO_HAPROXY)

    assert result.holds
    assert "skipped: HAProxy is not installed: apt-get install haproxy" in shown(result)
    assert NO_HAPROXY == result.as_json()["skipped"]


# --- blocks of the owners ---

TOKENS = list(range(64))
CHAIN = sequence_hashes(block_hashes(TOKENS, 16))
ENGINE_HASHES = [100, 101, 102, 103]


def stored(first: int, count: int) -> list[Any]:
    """The event of a few blocks of the chain, in the older format."""
    parent = ENGINE_HASHES[first - 1] if first else None
    tokens = TOKENS[16 * first : 16 * (first + count)]
    return ["BlockStored", ENGINE_HASHES[first : first + count], parent, tokens, 16]


def batch(*events: list[Any]) -> bytes:
    """One message of an engine."""
    return msgspec.msgpack.encode([time.time(), list(events)])


def test_engine_watch() -> None:
    """Blocks have their sequence hashes, and count as often as they are stored."""
    watch = EngineWatch()
    watch.batch(0, batch(stored(0, 2)))
    watch.batch(1, batch(stored(2, 2), stored(2, 2)))
    watch.batch(2, batch(["BlockRemoved", [103]], ["BlockRemoved", [101]]))

    assert watch.is_complete
    assert {CHAIN[0], CHAIN[2], CHAIN[3]} == watch.held()
    watch.batch(3, batch(["AllBlocksCleared"]))
    assert set() == watch.held()


def test_engine_that_restarts() -> None:
    """Number 0 means a new process without blocks."""
    watch = EngineWatch()
    watch.batch(5, batch())
    assert not watch.is_complete

    watch.batch(0, batch(stored(0, 1)))

    assert (True, {CHAIN[0]}) == (watch.is_complete, watch.held())


def test_missed_events() -> None:
    """A watch that has missed an event is incomplete."""
    watch = EngineWatch()
    watch.batch(0, batch(stored(1, 1)))

    assert not watch.is_complete


def row(*hashes: int) -> dict[str, Any]:
    """A replica's row of /workers."""
    return {"device_blocks": len(hashes), "digest": f"{sum(hashes) % (1 << 64):016x}"}


def test_phantoms() -> None:
    """A replica is compared with its agent, the agent with its engine; missing blocks are no phantoms."""
    engine = EngineWatch()
    engine.batch(0, batch(stored(0, 3)))
    agent: set[int] = set(CHAIN[:2])

    assert 0 == phantom_blocks(row(*CHAIN[:2]), agent, engine)
    assert 1 == phantom_blocks(row(*CHAIN[:3]), agent, engine)
    assert 1 == phantom_blocks(row(*CHAIN[1:3]), agent, engine)
    assert 1 == phantom_blocks(row(*CHAIN), set(CHAIN), engine)


# --- the moment at which a worker is killed, and what is left afterwards ---


class Replicas:
    """Two replicas that place every request at `w`, the first one only from the third request on."""

    urls, admin_urls = ("a", "b"), ("a-admin", "b-admin")

    def __init__(self) -> None:
        self.client = self
        self.asked: list[str] = []
        self.sent: list[LoadRequest] = []

    async def post_json(self, url: str, _body: bytes) -> Any:
        """POST /v1/route."""
        self.asked.append(url)
        return {"winner": "other/0" if self.asked.count("a-admin/v1/route") < 3 else "w/0"}

    async def get_json(self, url: str) -> Any:
        """GET /decisions/ID: 404 at first, as the decision is not made yet."""
        self.asked.append(url)
        if self.asked.count(url) == 1:
            raise HttpError("404")
        return {"decisions": [{"winner": "other/0"}, {"winner": "w/0"}]}

    def send(self, request: LoadRequest, url: str) -> Outcome:
        """A request of the load; in mode direct it is answered at once."""
        self.sent.append(request)
        return Outcome(len(self.sent), url, ended_at_s=1.0 if b"direct" in request.body else None)


async def test_requests_wait_at_the_worker() -> None:
    """First every replica has the prompt in its index; then each has placed a request before the kill."""
    replicas: Any = Replicas()

    await faults.make_known(replicas, replicas, "w", 0)
    known = list(replicas.asked)
    waiting = await faults.waiting_at(replicas, replicas, "w", 0)

    assert ["a-admin/v1/route"] * 3 + ["b-admin/v1/route"] == known
    assert 2 == len(waiting)
    prompts = {json.dumps(json.loads(request.body)["prompt"]) for request in replicas.sent}
    assert (3, 1) == (len(replicas.sent), len(prompts))


def test_row_names() -> None:
    """--only accepts every row."""
    assert len(ROWS) == len({row.name for row in ROWS})


@pytest.mark.parametrize("flags", [["--only", "nothing"], ["--rate", "0"]])
def test_refuses(flags: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Invalid flags are rejected."""
    with pytest.raises(SystemExit, match="2"):
        main(flags)
    assert "--only" in (said := capsys.readouterr().err) or "--rate" in said
