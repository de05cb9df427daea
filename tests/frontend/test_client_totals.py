"""GET /clients: who asks for how much."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

from kvrouter.core.fleet.router import Placement
from kvrouter.frontend.records import client_totals as module
from kvrouter.frontend.records.client_totals import (
    ClientAddresses,
    ClientRow,
    ClientsView,
    ClientTotals,
    Totals,
)
from kvrouter.frontend.records.record import AttemptRecord, Record, Work
from kvrouter.relay.request import Request, RequestHead
from kvrouter.telemetry.metrics import TargetCounts
from tests.frontend.fleet import BODY, STREAM, FleetOf
from tests.frontend.workers import OK, SSE_HEAD, answer, chunk, says, says_and_stalls, stream
from tests.relay.rig import FakeClient

MINUTE_S = 60.0
STALLS = says_and_stalls(SSE_HEAD, chunk(b": wait\n\n"))


def an_attempt(**fields: Any) -> AttemptRecord:
    """As it ended, with these fields; of its request and placement nothing is read."""
    rest: dict[str, Any] = {
        "excluded": None,
        "model": "m",
        "counts": TargetCounts(),
        "decided": (0.0, 0.0),
        "sent_at": 0.0,
    }
    return AttemptRecord(work=cast(Work, None), placement=cast(Placement, None), **rest, **fields)


def request_of(*forwarded: str) -> Request:
    fields = [("x-forwarded-for", one) for one in forwarded]
    return Request(RequestHead("POST", "/v1/completions", fields, wants_keep_alive=True), FakeClient())


class _Counted:
    """Totals by a clock that the test sets; every client is behind one trusted proxy."""

    def __init__(self, running: Sequence[tuple[Request, float]] = ()) -> None:
        self.now = 1000.0
        self.totals = ClientTotals(ClientAddresses(("127.0.0.1",)), lambda: self.now)
        self.running = running

    def ask(self, client: str, **grown: int) -> None:
        totals = self.totals.of(request_of(client), self.now)
        totals.requests += 1
        for name, by in grown.items():
            setattr(totals, name, getattr(totals, name) + by)

    def shown(self) -> ClientsView:
        return self.totals.shown(lambda: self.running)

    def rows(self) -> dict[str, ClientRow]:
        return {row.client: row for row in self.shown().clients}


def test_the_last_minute_next_to_the_ten_before() -> None:
    """What is older is forgotten; each part says how many seconds it covers."""
    counted = _Counted()
    for minute in range(20):
        counted.now = 1000.0 + MINUTE_S * minute
        counted.ask("10.0.0.1")
        if minute == 19:
            counted.ask("10.0.0.2", output_tokens=500)
    counted.now += 15.0
    shown, rows = counted.shown(), counted.rows()

    assert (45.0, 600.0) == (shown.now_s, shown.before_s)
    assert (1, 10) == (rows["10.0.0.1"].now.requests, rows["10.0.0.1"].before.requests)
    assert (500, 0) == (rows["10.0.0.2"].now.output_tokens, rows["10.0.0.2"].before.requests)


def test_at_the_start_and_after_silence() -> None:
    """A new replica has no minutes before; after an hour without requests nothing is left."""
    counted = _Counted()
    counted.now += 5.0
    counted.ask("10.0.0.1")
    assert (5.0, 0.0) == (counted.shown().now_s, counted.shown().before_s)
    counted.now += 3600.0

    assert {} == counted.rows()


def test_order() -> None:
    """First those whose requests took most seconds, with those that requests in flight have taken."""
    counted = _Counted([(request_of("10.0.0.3"), 998.0), (request_of("10.0.0.3"), 997.0)])
    counted.ask("10.0.0.1", seconds=1)
    counted.ask("10.0.0.2", seconds=9)

    assert [("10.0.0.2", 0, 0.0), ("10.0.0.3", 2, 5.0), ("10.0.0.1", 0, 0.0)] == [
        (row.client, row.in_flight, row.in_flight_s) for row in counted.shown().clients
    ]


def test_a_request_at_two_workers() -> None:
    """Its prompt counts once, in whatever number of attempts; the output is that of the last."""
    record = Record(request_of(), "r1", 0.0, 10.0, ended_at=12.5)
    for output_tokens in (1, 7):
        record.attempts.append(an_attempt(prompt_tokens=64, output_tokens=output_tokens))
    totals = Totals()
    totals.count(record.asked, record.output_tokens, "ok", record.lasted_s)

    assert Totals(requests=1, prompt_tokens=64, output_tokens=7, seconds=2.5) == totals


def test_many_clients() -> None:
    """Beyond the limit of half a minute they are counted together; those that are not shown are one row."""
    assert 1000 == module.MOST_CLIENTS
    counted = _Counted()
    for number in range(1100):
        counted.ask(f"10.0.{number // 250}.{number % 250}", seconds=number)
    shown = counted.shown().clients

    assert (module.MOST_ROWS + 1, "others") == (len(shown), shown[-1].client)
    assert ("10.0.3.249", "10.0.3.150") == (shown[0].client, shown[-2].client)
    assert 1100 == sum(row.now.requests for row in shown)


def test_headers_as_long_as_clients_like() -> None:
    """What is remembered of them is bounded; the address next to the proxy counts."""
    addresses = ClientAddresses(("127.0.0.1",))
    known = addresses._known
    most = known.cache_info().maxsize
    assert most is not None
    for number in range(most + 10):
        assert "10.0.0.9" == addresses.of(request_of("x" * 9_000 + f"{number}", "10.0.0.9"))

    assert most == known.cache_info().currsize


async def test_by_client(fleet_of: FleetOf) -> None:
    """Answers with their tokens, and what is rejected, by what the trusted proxy says."""
    scripts = (says(stream("a", "b", "c")),)
    async with fleet_of("--router-mode", "kv", "--trusted-proxies", "127.0.0.1", scripts=scripts) as fleet:
        for _ in range(2):
            await fleet.ask(STREAM, "x-forwarded-for: 10.0.0.1")
        await fleet.ask(b"{", "x-forwarded-for: 10.0.0.2")
        shown = (await fleet.get("/clients")).json
        rows = {row["client"]: row["now"] for row in shown["clients"]}

    assert {"10.0.0.1", "10.0.0.2"} == rows.keys()
    assert (2, 0, 0, 128, 6) == tuple(
        rows["10.0.0.1"][name] for name in ("requests", "failed", "refused", "prompt_tokens", "output_tokens")
    )
    assert 0 <= rows["10.0.0.1"]["seconds"] < MINUTE_S  # the loop's clock has whole milliseconds
    assert (1, 0, 1, 0) == tuple(
        rows["10.0.0.2"][name] for name in ("requests", "failed", "refused", "prompt_tokens")
    )


async def test_failures_and_cached_tokens(fleet_of: FleetOf) -> None:
    """A 500 of the engine is a failure; a repeated prompt is predicted to be cached."""
    fails = says(answer(b"{}", 500))
    async with fleet_of("--router-mode", "kv", "--retries", "0", scripts=(fails,)) as fleet:
        await fleet.ask(BODY)
        (row,) = (await fleet.get("/clients")).json["clients"]
    assert ("127.0.0.1", 1, 1) == (row["client"], row["now"]["requests"], row["now"]["failed"])
    async with fleet_of("--router-mode", "kv", "--no-use-kv-events", scripts=(OK,)) as fleet:
        for _ in range(2):
            await fleet.ask(BODY)
        (row,) = (await fleet.get("/clients")).json["clients"]
    assert (128, 48) == (row["now"]["prompt_tokens"], row["now"]["overlap_tokens"])


async def test_in_flight(fleet_of: FleetOf) -> None:
    """A request that is being answered is in flight, and not counted yet."""
    async with fleet_of(scripts=(STALLS,)) as fleet, fleet.connected() as client:
        client.send(STREAM)
        await client.read_until(b"wait")
        (row,) = (await fleet.get("/clients")).json["clients"]
        client.leave()

    assert (1, Totals().requests) == (row["in_flight"], row["now"]["requests"])
