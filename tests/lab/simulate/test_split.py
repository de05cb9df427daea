"""Prefill and decode apart in the simulator: roles, the wire, the blocks that wait, and what it is worth."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.lab.simulate import generated, workloads
from kvrouter.lab.simulate.cells import Cell
from kvrouter.lab.simulate.engines import Arrival
from kvrouter.lab.simulate.fleet import Run, SimulatedFleet
from kvrouter.lab.simulate.measures import Slo
from kvrouter.lab.simulate.placement import SimulatedReplicas
from kvrouter.lab.simulate.split import LATENCY_S, PEERS, PUBLISHED, Links, Roles
from kvrouter.lab.simulate.step_model import REFERENCE
from kvrouter.lab.simulate.traces import CONVERSATION_EXCERPT, read_trace
from kvrouter.policies import PolicySettings, new_policy

DEFAULTS = PolicySettings()
ONE_OF_EACH = Roles(1, 1)
STEP_S = REFERENCE.base_s + REFERENCE.prefill_token_s
"""A decode engine's step in which it computes the last token of a prompt."""


def prompt(at: float, own: int, blocks: int = 8, answer: int = 1, shared: int = 0) -> Arrival:
    """A prompt of whole blocks, the first `shared` of them those of prompt 1."""
    hashes = [1000 * (1 if place < shared else own) + place for place in range(blocks)]
    return Arrival(at, hashes, 512 * blocks, answer)


def prefill_s(tokens: int) -> float:
    """One step of an idle prefill engine."""
    return REFERENCE.base_s + REFERENCE.prefill_token_s * tokens


def served(
    arrivals: Sequence[Arrival], roles: Roles = ONE_OF_EACH, *, rule: str = "always", capacity: int = 1000
) -> Run:
    """Behind one router in mode kv."""
    policies = [new_policy("kv", DEFAULTS)]
    fleet = SimulatedFleet(
        lambda agenda: SimulatedReplicas(agenda, policies, random.Random(1), rule=rule),
        REFERENCE,
        capacity,
        [1.0] * (roles.prefill + roles.decode),
        roles=roles,
    )
    return fleet.run(arrivals)


def test_a_request_through_both() -> None:
    """The prompt in one large step, the wire, one step of the decode engine, then those of the answer."""
    run = served([prompt(0.0, 1, answer=11)])

    read_s = LATENCY_S + 4096 * ONE_OF_EACH.token_s
    assert [prefill_s(4096) + read_s + STEP_S] == pytest.approx(run.ttft_s)
    context_s = REFERENCE.context_token_s * sum(4097 + step for step in range(10))
    assert 10 * (REFERENCE.base_s + REFERENCE.decode_seq_s) + context_s == pytest.approx(10 * run.itl_s[0])
    assert ([True], "w2") == (run.handed, run.targets[0].worker_id)


def test_each_end_of_the_wire_serves_its_reads_in_order() -> None:
    """Two engines that read from one share its bandwidth; other pairs do not wait for them."""
    links, (p1, p2, d1, d2) = Links(1e-3), (Target(WorkerId(name)) for name in ("p1", "p2", "d1", "d2"))

    assert 1.0 + LATENCY_S == links.read(p1, d1, 1000, 0.0)
    assert 1.5 + LATENCY_S == links.read(p1, d2, 500, 0.2)
    assert 1.6 + LATENCY_S == pytest.approx(links.read(p2, d1, 600, 0.2))
    assert 9.1 + LATENCY_S == pytest.approx(links.read(p2, d2, 100, 9.0))


def test_only_what_the_decode_engine_lacks_is_sent() -> None:
    """The second prompt shares all but one block; the prefill engine computes only that one, too."""
    run = served([prompt(0.0, 1), prompt(5.0, 2, shared=7)])

    assert [0, 7 * 512] == run.cached
    read_s = LATENCY_S + 512 * ONE_OF_EACH.token_s
    assert prefill_s(512) + read_s + STEP_S == pytest.approx(run.ttft_s[1])


def test_blocks_wait_until_they_are_read() -> None:
    """A prefill engine with room for one prompt computes the next one when the first has been read."""
    roles = Roles(1, 1, gbps=1.0)
    run = served([prompt(0.0, 1), prompt(0.0, 2)], roles, capacity=10)

    both_s = prefill_s(4096) + LATENCY_S + 4096 * roles.token_s
    assert [both_s + STEP_S, 2 * both_s + STEP_S] == pytest.approx(run.ttft_s)


def test_a_decode_engine_has_room_before_it_reads() -> None:
    """With room for one request it reads the second prompt after the first answer."""
    run = served([prompt(0.0, 1, answer=200), prompt(0.0, 2, answer=2)], capacity=15)

    assert run.end_s[0] + LATENCY_S < run.first_s[1]


def test_a_whole_prompt_goes_first_at_its_decode_engine() -> None:
    """As in vLLM: a prompt that was read waits while another one is computed in chunks."""
    long, short = prompt(0.0, 1, blocks=80), prompt(0.0, 2)
    alone = served([short]).ttft_s[0]
    never = served([long, short], rule="never")

    assert [False, False] == never.handed
    assert alone < never.ttft_s[0] < never.ttft_s[1]


def test_roles() -> None:
    """By the order of the engines; others serve whole requests, those that join later too."""
    roles = Roles(2, 1)

    assert ["prefill", "prefill", "decode", "both", "both"] == [
        roles.of(name) for name in ("w1", "w2", "w3", "w4", "new")
    ]
    assert "2P+1D" == str(roles)
    assert 20e-6 == pytest.approx(Roles(1, 1, gbps=52.4288).token_s)


@pytest.mark.parametrize(
    ("rule", "stays"), [("dynamo", [True, True, False, False]), ("llm-d", [True, False, False, False])]
)
def test_published_rules(rule: str, stays: list[bool]) -> None:
    """By what the decode worker lacks: in tokens, and with Dynamo's as a share of the prompt."""
    asked = [(500, 4000), (2000, 4000), (2048, 4000), (2000, 2500)]

    assert stays == [PUBLISHED[rule](uncached, tokens) for uncached, tokens in asked]


def test_a_published_rule_keeps_what_its_decode_worker_holds() -> None:
    """The second prompt lacks one block at the only decode worker: less than 2,048, not less than 512."""
    asked = [prompt(0.0, 1), prompt(5.0, 2, shared=7)]

    assert [True, False] == served(asked, rule="dynamo").handed
    assert [True, True] == served(asked, rule="llm-d").handed


def measured(roles: Roles, mode: str) -> float:
    """Goodput within 2 s and 20 ms."""
    kept = [one for one in read_trace(CONVERSATION_EXCERPT) if one.prompt_tokens <= 40_000][:500]
    trace = workloads.trace(kept)
    cache = workloads.cache_of(trace, 614_400, 8)
    cell = Cell(trace, cache, load=0.64, workers=8, slo=Slo(itl_s=0.020), roles=roles)
    return cell.measure(mode, DEFAULTS, 0).goodput


def test_what_it_is_worth() -> None:
    """The router's rule has twice the goodput of whole engines, and survives a prefill engine too few."""
    whole, apart = measured(Roles(5, 3), "kv"), measured(Roles(5, 3), "kv@auto")
    wrong, always = (measured(Roles(4, 4), mode) for mode in ("kv@auto", "kv@always"))

    assert 2 * whole <= apart
    assert 2 * whole <= wrong
    assert always < 0.1


# --- from peers ---

WHOLE = Roles(0, 0)


def peers(arrivals: Sequence[Arrival], capacity: int = 1000) -> Run:
    """Two whole engines that read from each other, behind a router in mode kv:auto."""
    policies = [new_policy("kv", PolicySettings())]
    fleet = SimulatedFleet(
        lambda agenda: SimulatedReplicas(agenda, policies, random.Random(1), rule=PEERS),
        REFERENCE,
        capacity,
        [1.0] * 2,
        roles=WHOLE,
    )
    return fleet.run(arrivals)


def warmed() -> list[Arrival]:
    """Prompts from which the router learns how fast prefill is, and a warm one."""
    return [prompt(2.0 * number, 100 + number) for number in range(10)] + [prompt(30.0, 1)]


def test_an_engine_reads_from_its_peer() -> None:
    """While the one that holds the prompt computes another one for two seconds."""
    busy = prompt(40.0, 50, blocks=80, shared=8)
    run = peers([*warmed(), busy, prompt(40.1, 1)])

    (number,) = [number for number, handed in enumerate(run.handed) if handed]
    assert len(run.arrivals) - 1 == number
    assert 7 * 512 == run.cached[number]


def test_from_peers_pays() -> None:
    """Agents: first tokens are sooner, and answers end sooner."""
    workload = generated.agents()
    capacity = workloads.cache_of(workload, 614_400, 8)
    cell = Cell(workload, capacity, pace=2.0, workers=8, roles=WHOLE)
    alone, together = (cell.measure(mode, DEFAULTS, 0) for mode in ("kv", "kv@peers"))

    assert together.ttft_p50_s < 0.9 * alone.ttft_p50_s
    assert together.e2e_mean_s < alone.e2e_mean_s
    assert 0 == alone.handed < 0.1 < together.handed
