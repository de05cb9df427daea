"""The cases in which comparing seconds goes wrong if done without care: the default passes each of them.

Virtual time and fixed seeds: a run comes out the same each time. The oracle knows every queue and cache.
"""

from __future__ import annotations

from kvrouter.lab.simulate import generated, traces, workloads
from kvrouter.lab.simulate.cells import ORACLE, Cell
from kvrouter.lab.simulate.measures import Measures
from kvrouter.lab.simulate.step_model import REFERENCE, SHORTEST
from kvrouter.policies import PolicySettings
from tests.long import IS_LONG

TRACE = workloads.trace(traces.read_trace(traces.CONVERSATION_EXCERPT)[: 1200 if IS_LONG else 800])
AUTO, EIGHT, LEAST_LOADED = "kv", "kv:8", "least-loaded"


def run(cell: Cell, mode: str = AUTO) -> Measures:
    """One seed of a mode, with its default weight."""
    return cell.measure(mode, PolicySettings(), 0)


def hot(prefixes: int, **facts: int) -> Cell:
    """Requests that share 4,096 tokens with many others, at 60 a second."""
    return Cell(generated.hot(prefixes, count=1200), cache=3.0, **facts)  # type: ignore[arg-type]


def test_overload_is_decided_better_than_greedily() -> None:
    """The price of congestion lowers the total work, so p90 is below that of a greedy oracle."""
    cell = Cell(TRACE, cache=0.25, load=0.9)

    assert run(cell).ttft_p90_s < run(cell, ORACLE).ttft_p90_s


def test_moderate_load_is_decided_as_an_oracle_would() -> None:
    """Within 5 % of its p90, and far ahead of the published weight."""
    cell = Cell(TRACE, cache=0.5, load=0.6)
    oracle, auto = run(cell, ORACLE), run(cell)

    assert auto.ttft_p90_s < 1.05 * oracle.ttft_p90_s
    assert auto.goodput > 0.97 * oracle.goodput
    assert run(cell, "kv:1").ttft_p90_s > 1.2 * auto.ttft_p90_s


def test_a_hot_prefix_is_not_one_workers_work() -> None:
    """The oracle herds here: its busiest worker has four times the mean."""
    measured = run(hot(1))

    assert measured.busiest < 1.3
    assert measured.ttft_p90_s < 0.045


def test_ten_hot_prefixes_are_balanced() -> None:
    """Each is copied in proportion to its share."""
    assert run(hot(10)).busiest < 1.5


def test_agents_with_one_system_prompt_use_all_engines() -> None:
    """Few of their requests end with the system prompt, but all begin with it."""
    cell = Cell(generated.agents(40), cache=1.0, workers=8)
    oracle, auto = run(cell, ORACLE), run(cell)

    assert auto.busiest < 1.6 < oracle.busiest
    assert auto.ttft_p90_s < oracle.ttft_p90_s
    assert auto.itl_p90_s < 0.8 * oracle.itl_p90_s


def test_four_replicas_decide_as_an_oracle_would() -> None:
    """Each learns from the first bytes of all of them."""
    cell = Cell(TRACE, cache=0.5, load=0.6, replicas=4)

    assert run(cell).ttft_p90_s < 1.05 * run(cell, ORACLE).ttft_p90_s


def test_eight_replicas_share_a_hot_prefix() -> None:
    """Their choices in one moment do not fall on the same worker."""
    assert run(hot(1, replicas=8)).busiest < 1.3


def test_unsynced_replicas_are_no_ruin() -> None:
    """A head that is overdue because of unknown requests does not count as nearly done."""
    cell = Cell(TRACE, cache=0.5, load=0.6, replicas=4, sync=None)

    assert run(cell).ttft_p90_s < 1.1 * run(cell, EIGHT).ttft_p90_s


def test_engines_of_mixed_speed() -> None:
    """Neither p90 nor p99 is above that of the best fixed weight."""
    cell = Cell(TRACE, cache=0.5, load=0.6, workers=8, speeds=(1.0, 1.0, 0.5))
    auto, eight = run(cell), run(cell, EIGHT)

    assert auto.ttft_p90_s <= eight.ttft_p90_s
    assert auto.ttft_p99_s <= eight.ttft_p99_s


def test_engines_with_an_order_of_their_own() -> None:
    """Four prompts at a time, or the shortest first: still ahead of the best fixed weight."""
    for model in (REFERENCE.served(REFERENCE.order, 4), REFERENCE.served(SHORTEST, 1)):
        cell = Cell(TRACE, cache=0.5, load=0.6, model=model)

        assert run(cell).ttft_p90_s <= run(cell, EIGHT).ttft_p90_s


def test_clients_that_leave() -> None:
    """An aborted prefill makes way and teaches nothing wrong."""
    cell = Cell(TRACE, cache=0.5, load=0.6, leaving=0.3)

    assert run(cell).ttft_p90_s < 1.05 * run(cell, ORACLE).ttft_p90_s


def test_bursts_of_siblings_share_where_it_pays() -> None:
    """Through four replicas at once: a burst waits less than where the fewest requests are."""
    cell = Cell(generated.siblings(100), cache=3.0, replicas=4)
    auto, least = run(cell), run(cell, LEAST_LOADED)

    assert auto.ttft_p90_s < 0.9 * least.ttft_p90_s


def test_without_reuse_it_balances() -> None:
    """As well as the fewest requests do."""
    cell = Cell(workloads.zero(traces.read_trace(traces.CONVERSATION_EXCERPT)[:1200]), cache=1.0)

    assert run(cell).ttft_p90_s < 1.03 * run(cell, LEAST_LOADED).ttft_p90_s
