"""Sessions of agents: where their next turn is expected, and that this costs neither balance nor overlap."""

from __future__ import annotations

import random
from collections import Counter, deque

import pytest

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.router import Router, RouterRules
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.filters import FilterSettings, new_filters
from kvrouter.core.wire.ids import RouterId, Target
from kvrouter.policies.baseline import LeastLoaded
from kvrouter.policies.kv import Kv
from tests.core.worlds import T1, T2, book, card, chain_from, new_pool, prompt, request

PROMPT = prompt(chain_from(1000, 10))


def new_router(
    pool: Pool, policy: BuiltInPolicy | None = None, *, is_on: bool = True, seed: int = 1
) -> Router:
    """A router with the default filters."""
    filters = new_filters(FilterSettings(agent_sessions=is_on))
    return Router(
        pool, RouterRules(policy or Kv(), random.Random(seed).random, filters=filters),
        router_id=RouterId("me"), incarnation=1, synced=False,
    )  # fmt: skip


def served(router: Router, session: str, parent: str = "", *, known: bool = False) -> Target:
    """A request of the session that has ended; without a known prompt unless `known`."""
    prompts = (PROMPT,) if known else ()
    placed = router.route(request(*prompts, session=session, parent_session=parent), 0.0)
    router.bookings.free(placed.key)
    return placed.target


def test_next_turn_without_a_known_prompt() -> None:
    """All turns of a session go to one worker, while it is as free as the others."""
    router = new_router(new_pool(*(card(f"w{number}") for number in range(1, 9))))

    assert 1 == len({served(router, "chat") for _ in range(20)})


def test_child_begins_at_its_parent() -> None:
    """A session that has not run yet prefers its parent's worker; then its own counts."""
    router = new_router(new_pool(*(card(f"w{number}") for number in range(1, 9))))
    parent = served(router, "parent", known=True)
    assert {parent} == {served(router, f"child {n}", "parent") for n in range(20)}

    other = Target(card("w1" if parent != T1 else "w2").worker_id)  # type: ignore[arg-type]
    router.tables.sessions.bind("child 1", other, 0.0)
    assert other == served(router, "child 1", "parent")


def test_overlap_decides() -> None:
    """A worker that holds the prompt gets it, wherever the session ran before."""
    pool = new_pool(card("w1"), card("w2"))
    router = new_router(pool)
    router.tables.sessions.bind("chat", T1, 0.0)
    pool.index.store(T2, PROMPT.hashes)

    assert T2 == served(router, "chat", known=True)


@pytest.mark.parametrize(("known", "requests", "chosen"), [(True, 1, T2), (False, 1, T1), (False, 2, T2)])
def test_busy_worker_is_not_preferred(known: bool, requests: int, chosen: Target) -> None:
    """The preference is among the freest; without a known prompt one request more is accepted."""
    pool = new_pool(card("w1"), card("w2"))
    router = new_router(pool)
    router.tables.sessions.bind("chat", T1, 0.0)
    for _ in range(requests):
        book(pool, T1, [], prefill_tokens=16)

    assert chosen == served(router, "chat", known=known)


def test_modes_that_do_not_route_by_cache() -> None:
    """They keep their own choice, and bind nothing."""
    router = new_router(new_pool(card("w1"), card("w2")), LeastLoaded())

    assert {T1, T2} == {served(router, "chat") for _ in range(40)}
    assert 0 == len(router.tables.sessions)


def test_flag() -> None:
    """Off, sessions decide nothing."""
    router = new_router(new_pool(card("w1"), card("w2")), is_on=False)

    assert {T1, T2} == {served(router, "chat") for _ in range(40)}


@pytest.mark.parametrize("known", [True, False])
def test_balance_and_overlap(known: bool) -> None:
    """Over 2,000 turns of 60 sessions: no more requests on the fullest worker, no fewer cached blocks."""
    on, off = (_run(is_on=is_on, known=known) for is_on in (True, False))

    assert on["fullest"] <= off["fullest"] + 1
    assert on["cached"] >= off["cached"]
    assert on["same worker"] >= off["same worker"]


def _run(*, is_on: bool, known: bool) -> Counter[str]:
    """Growing chats, 24 requests in flight on six workers; what is sent is cached at once."""
    pool = new_pool(*(card(f"w{number}") for number in range(1, 7)))
    router, chance = new_router(pool, is_on=is_on), random.Random(7)
    turns, last, running, found = Counter[int](), dict[int, Target](), deque[object](), Counter[str]()
    for _ in range(2000):
        chat = chance.randrange(60)
        turns[chat] += 1
        chain = chain_from(chat * 100_000, 4 * turns[chat])
        placed = router.route(request(*([prompt(chain)] if known else []), session=f"chat {chat}"), 0.0)
        router.bookings.mark_prefill_completed(placed.key, 0.0)
        found["cached"] += pool.index.overlap(chain).get(placed.target, 0)
        found["same worker"] += last.get(chat) == placed.target
        pool.index.store(placed.target, chain)
        last[chat] = placed.target
        running.append(placed.key)
        found["fullest"] = max(found["fullest"], *(pool.active.requests(target) for target in pool.targets))
        if len(running) > 24:
            router.bookings.free(running.popleft())  # type: ignore[arg-type]
    return found
