"""A worker whose answers begin much later than the others': made up, and a real mocker."""

from __future__ import annotations

import asyncio
import itertools
import uuid
from typing import Any

import pytest
from msgspec import to_builtins

from kvrouter.observe.doctor.replicas import Examined
from kvrouter.observe.doctor.slow_workers import LEAST_ANSWERS, check_slow_workers
from kvrouter.observe.document import Fleet, TargetRow
from tests.e2e.fleet import running_fleet
from tests.long import needs_long
from tests.observe.doctor.sick import answering, codes, examination, replica, seen, sick_namespace
from tests.observe.fleets import fleet, target


def row(worker: str, answers: int, mean_s: float, tokens: int = 1000, **more: Any) -> TargetRow:
    """A row of /fleet. `tokens`: uncached ones of each prompt."""
    sums = {"ttft_count": answers, "ttft_sum_s": answers * mean_s, "overlap_tokens": answers * tokens}
    usual = {"pool": "p", "running": 3, "prompt_tokens": 2 * answers * tokens}
    return target(worker, **(usual | sums | more))


def found(*replicas: tuple[Fleet, Fleet]) -> dict[str, str]:
    """What is seen of each slow worker, of replicas that answer with these two /fleet."""
    made = [
        Examined(f"http://r{number}", is_given=True, fleet=first, fleet_later=later)
        for number, (first, later) in enumerate(replicas)
    ]
    return {finding.about: finding.seen for finding in check_slow_workers(made)}


MANY = 100


def test_slow_since_the_start() -> None:
    """The worker is named, with both times, and its load."""
    later = fleet(row("a", MANY, 0.2), row("b", MANY, 1.0, waiting=7), row("c", MANY, 0.2))

    assert {
        "b": "p: TTFT 1.000 s, 0.200 s at the others (100 answers) since the replicas' start; "
        "running 3, waiting 7, KV cache 50%"
    } == found((later, later))


def test_slow_now() -> None:
    """What was served between the looks counts first: one has become slow, one is mended."""
    first = fleet(row("a", MANY, 0.2), row("now", MANY, 0.2), row("once", MANY, 2.0))
    later = fleet(
        row("a", 2 * MANY, 0.2),
        row("now", 2 * MANY, 0.7),  # 1.2 s each in between
        row("once", 2 * MANY, 1.1),  # 0.2 s
    )

    ((worker, said),) = found((first, later)).items()
    assert "now" == worker
    assert "TTFT 1.200 s, 0.200 s at the others (100 answers) while looking" in said


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param([row("a", MANY, 0.2), row("b", MANY, 0.5)], id="2.5 times"),
        pytest.param([row("a", MANY, 0.002), row("b", MANY, 0.02)], id="18 ms"),
        pytest.param([row("a", MANY, 0.2), row("b", LEAST_ANSWERS - 1, 2.0)], id="too few answers"),
        pytest.param([row("a", MANY, 0.2), row("b", LEAST_ANSWERS, 0.8)], id="4 times, of few answers"),
        pytest.param([row("a", LEAST_ANSWERS - 1, 0.2), row("b", MANY, 2.0)], id="none to compare with"),
        pytest.param([row("a", MANY, 0.2), row("b", MANY, 1.0, pool="q")], id="another pool"),
        pytest.param([row("a", MANY, 0.2, 1000), row("b", MANY, 1.0, 5000)], id="longer prompts"),
    ],
)
def test_not_slow(rows: list[TargetRow]) -> None:
    """Little difference, too few answers, other work."""
    assert {} == found((fleet(*rows), fleet(*rows)))


def test_few_answers_of_other_work() -> None:
    """A slow worker gets few requests, and has more to compute for each, as the others have the caches."""
    rows = [row("a", MANY, 0.03, 30), row("b", MANY, 0.03, 30), row("c", 4, 0.16, 80)]

    assert ["c"] == [*found((fleet(*rows), fleet(*rows)))]


def test_replicas_and_ranks_together() -> None:
    """What no replica sees alone: each has sent it half of the answers, to two ranks. A URL counts once."""
    rows = [row("a", MANY, 0.2), row("b", LEAST_ANSWERS - 1, 1.0), row("b", 0, 0.0, rank=1)]
    one, other = fleet(*rows), fleet(*rows, router_id="s")

    assert ["b"] == [*found((one, one), (other, other))]
    assert {} == found((one, one), (one, one))


def test_restart_between_the_looks() -> None:
    """Counters that begin anew are not compared."""
    slow = [row("a", MANY, 0.2), row("b", MANY, 1.0)]

    assert {} == found((fleet(*slow), fleet(*slow, router_id="new")))


async def test_in_the_report(nats_url: str) -> None:
    """Both looks are at /fleet; the finding is a warning."""
    looks = itertools.chain(
        [to_builtins(fleet(row("a", 0, 0), row("b", 0, 0)))],
        itertools.repeat(to_builtins(fleet(row("a", MANY, 0.2), row("b", MANY, 1.0)))),
    )
    answers = replica("r", **{"/fleet": lambda: next(looks)})
    async with sick_namespace(nats_url) as namespace, answering(answers) as url:
        namespace.replica("r", url)
        report = await namespace.examine()

    assert ["b"] == codes(report)["engine.slow"]
    assert "while looking" in seen(report, "engine.slow")


@needs_long("12 seconds")
async def test_a_slowed_mocker(nats_url: str) -> None:
    """One of three mockers, slowed 5 times, is named; before, and with the same load, none is."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, mockers=3, flags=("--router-mode", "round-robin")) as up:
        numbers = itertools.count()

        async def one(url: str) -> None:
            prompt = [next(numbers), *range(1500)]  # no other begins so: nothing is cached
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 2}
            async with up.http.post(f"{url}/v1/completions", json=body | {"stream": True}) as response:
                assert 200 == response.status
                await response.read()

        async def load(rounds: int) -> None:
            for _ in range(rounds):
                for replica_ in up.frontends:
                    await asyncio.gather(*(one(replica_.url) for _ in up.mockers))

        async def speed(number: int, speedup: float) -> None:
            async with up.http.post(f"{up.mockers[number].url}/speed", json={"speedup": speedup}) as response:
                assert 200 == response.status

        for number in range(3):
            await speed(number, 1.0)
        await load(10)
        assert "engine.slow" not in codes(await examination(nats_url, namespace))
        await speed(1, 0.2)
        loading = asyncio.create_task(load(1000))
        report = await examination(nats_url, namespace, listen_s=8.0)
        loading.cancel()
        await asyncio.wait([loading])

    (named,) = codes(report)["engine.slow"]
    print(seen(report, "engine.slow"))  # noqa: T201
    assert named.endswith(up.mockers[1].url.rpartition(":")[2])
