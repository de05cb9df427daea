"""What `kvrouter top` shows, from looks at replicas."""

from __future__ import annotations

import io
from typing import Any

import msgspec
import pytest
from msgspec.structs import replace
from rich.console import Console

from kvrouter.core.wire.heartbeats import Times
from kvrouter.observe.replica import open_replicas
from kvrouter.observe.settings import ReplicaAccess
from kvrouter.observe.top.__main__ import _ask, keys_in
from kvrouter.observe.top.screen import Choices, draw
from kvrouter.observe.top.view import History, Seen, arranged, quantile, view
from tests.observe.doctor.sick import answering
from tests.observe.fleets import fleet, target

A, B = "http://a", "http://b"


def test_since_an_earlier_answer() -> None:
    """Rates, times and shares cover the time between two looks, not the life of the replica."""
    old = fleet(target("w0"))
    traffic = replace(
        old.traffic, requests=30, failed=3, output_tokens=600, ttft=Times((0.1, 1.0), [8, 12, 0]),
        reusable_tokens=200, uncached_tokens={"chosen": 75, "best": 60, "pooled": 20}, later_s=3.0,
        ttft_decisions=14,
    )  # fmt: skip
    new = fleet(target("w0", answers=30, ttft_sum_s=6.0, ttft_count=20), fleet_traffic=traffic, time=3.0)
    shown = view({A: Seen(new, old)})
    (row,) = shown.rows

    assert (10.0, 0.5) == (row.rate, row.ttft_s)
    assert (10.0, 200.0, 0.5, 2) == (
        shown.facts.requests_per_s, shown.facts.tokens_per_s, shown.facts.later_s, shown.facts.failed,
    )  # fmt: skip
    assert {"chosen": 0.75, "best": 0.8, "pooled": 1.0} == pytest.approx(shown.facts.cached)
    assert shown.facts.ttft_p50_s == pytest.approx(0.55)


def test_roles() -> None:
    """The role of half of a pair stands behind its state; the filter finds it."""
    answer = fleet(target("w0", role="prefill"), target("w1"))
    rows = arranged(view({A: Seen(answer)}).rows, "target", "prefill")

    assert [("w0/0", "up", ", prefill")] == [(row.name, row.state, row.part) for row in rows]


def test_the_last_minute() -> None:
    """Of many answers the one of a minute ago is subtracted; of few the first one."""
    history = History()
    seen = [history.seen(fleet(target("w0"), time=float(second))) for second in range(200)]

    assert (None, 0.0) == (seen[0].before, seen[0].seconds)
    assert (1.0, 30.0) == (seen[1].seconds, seen[30].seconds)
    assert all(55 <= one.seconds <= 60 for one in seen[60:])


def test_no_first_byte_in_that_time() -> None:
    """The mean of the replica's whole life would hide what is slow now."""
    (row,) = view({A: Seen(fleet(target("w0"), time=2.0), fleet(target("w0")))}).rows

    assert (0.0, None) == (row.rate, row.ttft_s)


@pytest.mark.parametrize("changed", [{"started_s": 9.0}, {"time": 0.5}, {"router_id": "b"}])
def test_a_replica_that_started_again(changed: dict[str, Any]) -> None:
    """Counters of another life are not subtracted; nor is what a clock that was set back makes later."""
    history = History()
    history.seen(fleet(target("w0", answers=900)))
    seen = history.seen(replace(fleet(target("w0", answers=1)), **changed))
    shown = view({A: seen})

    assert (None, None) == (shown.facts.requests_per_s, shown.rows[0].rate)


def test_an_older_replica() -> None:
    """One that does not add up the traffic of all shows its own."""
    old = fleet(fleet_traffic=None)
    shown = view({A: Seen(replace(old, time=2.0, traffic=replace(old.traffic, requests=14)), old)})

    assert (4.0, None) == (shown.facts.requests_per_s, shown.facts.ttft_p50_s)


def test_two_replicas_count_the_same_requests() -> None:
    """The first line comes from one of them: both count the requests of all."""
    before = [fleet(), fleet(router_id="b")]
    grown = replace(before[0].traffic, requests=14)
    one, other = [Seen(replace(each, time=2.0, fleet_traffic=grown), each) for each in before]
    shown = view({"http://c": Seen("no answer"), A: one, B: other})

    assert 4.0 == shown.facts.requests_per_s


def test_disagreements() -> None:
    """Different blocks at one frame, different states, and targets that one replica does not know."""
    one = fleet(target("w0"), target("w1"), target("w2"), target("w3"), hears="ab")
    other = fleet(
        target("w0", digest="e"), target("w1", digest="e", seq=8), target("w2", state="down"),
        router_id="b", hears="b", revision=2,
    )  # fmt: skip
    shown = view({A: Seen(one), B: Seen(other), "http://c": Seen("cannot be reached")})

    assert {
        "w0/0": "replicas hold different blocks",
        "w1/0": "",
        "w2/0": "replicas see different states",
        "w3/0": "known to 1 of 2 replicas",
    } == {row.name: row.differs for row in shown.rows}
    assert [
        "http://c: cannot be reached",
        "http://b does not hear a",
        "the replicas route by different revisions of POST /routing",
    ] == shown.problems


def test_order_and_filter() -> None:
    """The greatest first; the filter sees names, states and problems."""
    odd = target("w2", problems=["Tokens differ"])
    rows = view({A: Seen(fleet(target("w0"), target("w10", requests=5), odd))}).rows

    assert ["w10/0", "w0/0", "w2/0"] == [row.name for row in arranged(rows, "requests", "")]
    assert ["w10/0", "w2/0", "w0/0"] == [row.name for row in arranged(rows, "target", "", is_reversed=True)]
    assert ["w2/0"] == [row.name for row in arranged(rows, "target", "tokens")]


@pytest.mark.parametrize(
    ("counts", "expected"),
    [([0, 0, 0], None), ([4, 0, 0], 0.5), ([0, 4, 0], 2.0), ([0, 0, 4], 3.0), ([2, 2, 0], 1.0)],
)
def test_quantile(counts: list[int], expected: float | None) -> None:
    """Linear within a bucket; above the last bound that bound."""
    assert expected == quantile(0.5, (1.0, 3.0), counts)


@pytest.mark.parametrize(("width", "height"), [(200, 50), (80, 24), (40, 8), (24, 5)])
def test_only_rows_that_fit_are_drawn(width: int, height: int) -> None:
    """Of 1,000 targets as many as fit, the selected one among them, in any size of the terminal."""
    shown = view({A: Seen(fleet(*[target(f"w{n:03}") for n in range(1000)]))})
    choices = Choices("target", selected=700)
    console = Console(width=width, height=height, record=True, file=io.StringIO())
    console.print(draw(shown, choices, width=width, height=height))
    text = console.export_text()

    assert "w700" in text
    assert text.count("\n") <= max(height, 6)


def test_a_narrow_terminal() -> None:
    """80 columns: all facts, and problems whole, on several lines; targets are left to see."""
    sentence = "its KV events never name the blocks of the requests that it served: the tokenizer. " * 2
    rows = [target("w0", problems=[sentence.strip()]), *[target(f"w{n}") for n in range(1, 30)]]
    shown = view({A: Seen(fleet(*rows)), B: Seen("cannot be reached: " + "no route to host, " * 9)})
    console = Console(width=80, height=24, record=True, file=io.StringIO())
    console.print(draw(shown, Choices("target", shows_detail=True), width=80, height=24))
    lines = [line.rstrip() for line in console.export_text().splitlines()]
    text = " ".join(" ".join(lines).split())

    assert {"failed -", sentence.strip(), "no route to host, " * 8} == {
        one for one in ("failed -", sentence.strip(), "no route to host, " * 8) if one in text
    }
    assert len(lines) <= 24
    assert "w3/0" in text


def test_more_problems_than_fit() -> None:
    """An ellipsis says that there are more."""
    shown = view({f"http://{n}": Seen("cannot be reached") for n in range(9)})
    console = Console(width=120, height=12, record=True, file=io.StringIO())
    console.print(draw(shown, Choices("target"), width=120, height=12))
    text = console.export_text()

    assert "! http://2: cannot be reached…" in text
    assert "http://3" not in text


async def test_a_server_that_is_no_replica() -> None:
    """JSON that is nested too deeply, or has a number that cannot be, is not a fleet."""
    impossible = msgspec.json.encode(fleet(target("w", running=-1))).decode()
    nested, of_others = {"/fleet": '{"a":' * 100_000}, {"/fleet": impossible}
    async with (
        answering(nested) as one,
        answering(of_others) as other,
        open_replicas([one, other], ReplicaAccess()) as replicas,
    ):
        said = [str(await _ask(replica)) for replica in replicas]

    assert said[0].startswith("/fleet is not JSON")
    assert "/fleet is not in this version's format: w/0 has -1" == said[1]


def test_keys() -> None:
    """Sequences of terminals, and characters, also several at once."""
    assert ["up", "j", "page down", "enter", "escape", "q"] == keys_in("\x1b[Aj\x1b[6~\r\x1bq")


def test_unknown_sequences_are_no_keys() -> None:
    """An arrow to the side or Home is not Escape, which would end the filter."""
    assert ["up", "q", "escape"] == keys_in("\x1b[C\x1b[A\x1bOHq\x1b[1;5D\x1b")


def test_the_selected_target_stays_selected() -> None:
    """Also when it changes its place; names of agents are shown as they are, without control characters."""
    choices = Choices("requests", selected=1)
    for requests in (1, 9):
        odd = target("[red]w\x1b[2J", requests=requests)
        shown = view({A: Seen(fleet(target("w0", requests=5), odd))})
        console = Console(width=150, height=9, record=True, file=io.StringIO())
        console.print(draw(shown, choices, width=150, height=9))

        assert "[red]w?[2J/0" == choices.rows[choices.selected].name.replace("\x1b", "?")
        assert "[red]w?[2J/0" in console.export_text()
