"""Which prompts are to blame for the deaths of workers, and which are not."""

from __future__ import annotations

import random

import pytest

from kvrouter.core.tables.deadly_prompts import (
    DEATH_S,
    DOUBT_S,
    MOST_DEADLY,
    MOST_DEATHS,
    MOST_SUSPECTED,
    SETTLE_S,
    DeadlyPrompts,
)
from kvrouter.core.wire.ids import PoolId, PromptHash, WorkerId

POOL = PoolId("m-12345678")
A, B, C, D = (WorkerId(name) for name in "abcd")


def prompt(name: object) -> PromptHash:
    """Another one for each name."""
    return PromptHash(str(name).encode().rjust(16, b"."))


KILLER, OTHER = prompt("killer"), prompt("other")


@pytest.fixture
def prompts() -> DeadlyPrompts:
    """Prompts are refused for 600 s."""
    return DeadlyPrompts(600.0)


def die(prompts: DeadlyPrompts, worker: WorkerId, at: float, *in_hand: PromptHash, sent_at: float) -> None:
    """A worker dies with these prompts in hand."""
    for one in in_hand:
        prompts.lost(one, POOL, worker, sent_at=sent_at, lost_at=at, now=at)
        prompts.check()


def judge(prompts: DeadlyPrompts, worker: WorkerId, at: float, *in_hand: PromptHash) -> list[PromptHash]:
    """Which of these are to blame, once it has settled."""
    return [one for one in in_hand if prompts.judge(one, worker, at + SETTLE_S) is not None]


def test_two_deaths(prompts: DeadlyPrompts) -> None:
    """A prompt that is sent again after a death, and lost at another worker, is refused for the TTL."""
    die(prompts, A, 10.0, KILLER, sent_at=9.0)
    first = judge(prompts, A, 10.0, KILLER)
    die(prompts, B, 12.0, KILLER, sent_at=10.6)
    second = judge(prompts, B, 12.0, KILLER)

    found = prompts.refused(KILLER, 13.0)
    assert ([], [KILLER]) == (first, second)
    assert found is not None
    assert ((A, B), 612.5) == (found.workers, found.ends_at)
    assert prompts.refused(KILLER, 613.0) is None
    prompts.expire(613.0)
    assert prompts.is_empty


def test_one_worker_twice(prompts: DeadlyPrompts) -> None:
    """A worker that dies again and again proves nothing of a prompt: it may be the worker."""
    for at in (10.0, 30.0, 50.0):
        die(prompts, A, at, KILLER, sent_at=at - 1)

        assert not judge(prompts, A, at, KILLER)


def test_ordinary_requests_are_not_to_blame(prompts: DeadlyPrompts) -> None:
    """What else was in hand at each death is neither refused nor suspected, once the killer is known."""
    first, second = [prompt(n) for n in range(20)], [prompt(n) for n in range(20, 40)]
    die(prompts, A, 10.0, KILLER, *first, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, *second, sent_at=11.0)

    assert [KILLER] == judge(prompts, B, 12.0, *second, KILLER)
    assert not prompts.suspects()


def test_a_node_fails(prompts: DeadlyPrompts) -> None:
    """What was in hand at three workers that die together was lost once, even one prompt on all of them."""
    for worker, at in ((A, 10.0), (B, 10.1), (C, 10.4)):
        die(prompts, worker, at, KILLER, sent_at=9.0)

        assert not judge(prompts, worker, at, KILLER)
    die(prompts, D, 20.0, KILLER, sent_at=19.0)
    assert [KILLER] == judge(prompts, D, 20.0, KILLER)


def test_two_that_were_at_both_deaths(prompts: DeadlyPrompts) -> None:
    """Two prompts in hand at both deaths are not refused; kept apart, the next death shows which it is."""
    die(prompts, A, 10.0, KILLER, OTHER, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, OTHER, sent_at=11.0)

    assert not judge(prompts, B, 12.0, KILLER, OTHER)
    assert prompts.is_shared(KILLER, B)
    assert prompts.is_apart(KILLER)
    assert prompts.is_apart(OTHER)
    assert prompts.begin(OTHER, C)
    assert [C] == prompts.taken()
    die(prompts, D, 14.0, KILLER, prompt("new"), sent_at=13.0)
    assert [KILLER] == judge(prompts, D, 14.0, KILLER, prompt("new"))
    prompts.end(OTHER)
    assert not prompts.is_apart(OTHER)


def test_answered(prompts: DeadlyPrompts) -> None:
    """An answer to its end clears a prompt: what is lost later is a first loss."""
    die(prompts, A, 10.0, OTHER, sent_at=9.0)
    prompts.answered(OTHER)
    die(prompts, B, 20.0, OTHER, sent_at=19.0)

    assert not judge(prompts, B, 20.0, OTHER)


def test_turns(prompts: DeadlyPrompts) -> None:
    """A lost prompt waits until the death has settled, and then is tried by one request at a time."""
    die(prompts, A, 10.0, KILLER, sent_at=9.0)

    assert prompts.must_wait(KILLER, 10.4)
    assert not prompts.must_wait(OTHER, 10.4)
    assert not prompts.must_wait(KILLER, 10.5)
    assert prompts.begin(KILLER, B)
    assert prompts.must_wait(KILLER, 10.5)
    assert not prompts.begin(KILLER, C)
    prompts.end(KILLER)
    assert not prompts.must_wait(KILLER, 10.5)


def test_doubt(prompts: DeadlyPrompts) -> None:
    """A prompt whose connection broke waits; the loss counts from that moment, if the worker is gone."""
    prompts.doubt(KILLER, POOL, 10.0)
    prompts.doubt(OTHER, POOL, 10.0)

    assert prompts.must_wait(KILLER, 11.0)
    assert not prompts.must_wait(KILLER, 10.0 + DOUBT_S)
    prompts.lost(KILLER, POOL, A, sent_at=9.0, lost_at=10.0, now=10.8)
    assert prompts.must_wait(KILLER, 11.2)
    assert not prompts.must_wait(KILLER, 11.4)
    prompts.expire(10.0 + DOUBT_S)
    assert [(KILLER, POOL)] == prompts.suspects()
    die(prompts, B, 12.0, KILLER, sent_at=10.6)
    assert [KILLER] == judge(prompts, B, 12.0, KILLER)


def test_end_of_doubt(prompts: DeadlyPrompts) -> None:
    """If the worker lives, the prompt is suspected no more than before."""
    die(prompts, A, 10.0, OTHER, sent_at=9.0)
    for one in (KILLER, OTHER):
        prompts.doubt(one, POOL, 12.0)
        prompts.end_doubt(one)

    assert [(OTHER, POOL)] == prompts.suspects()
    assert not prompts.must_wait(OTHER, 12.6)


def test_later_death_of_the_same_worker(prompts: DeadlyPrompts) -> None:
    """A worker that has come back may die again: what was in hand then is judged by itself."""
    die(prompts, A, 10.0, KILLER, OTHER, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, OTHER, sent_at=11.0)
    again = 12.0 + 2 * DEATH_S
    die(prompts, C, again - 5, KILLER, sent_at=again - 6)

    assert [KILLER] == judge(prompts, C, again - 5, KILLER)
    die(prompts, B, again, OTHER, sent_at=again - 1)
    assert not judge(prompts, B, again, OTHER)


def test_lost_workers(prompts: DeadlyPrompts) -> None:
    """Lost workers are avoided for a few seconds."""
    die(prompts, A, 10.0, KILLER, sent_at=9.0)

    assert [A] == list(prompts.lost_workers(12.0))
    assert [] == list(prompts.lost_workers(16.0))


def test_off() -> None:
    """With a TTL of 0 no prompt is suspected or refused, whatever peers say."""
    prompts = DeadlyPrompts(0.0)
    die(prompts, A, 10.0, KILLER, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, sent_at=11.0)
    prompts.doubt(OTHER, POOL, 10.0)
    prompts.learn(KILLER, POOL, [A, B], 600.0, 12.0)

    assert prompts.is_empty
    assert prompts.refused(KILLER, 12.0) is None


def test_a_peers_word(prompts: DeadlyPrompts) -> None:
    """A prompt that a peer refuses is refused here, for as long as this replica does it at most."""
    prompts.learn(KILLER, POOL, [A, B], 10**9, 5.0)

    found = prompts.refused(KILLER, 6.0)
    assert found is not None
    assert 605.0 == found.ends_at


def test_pardon_goes_before_peers(prompts: DeadlyPrompts) -> None:
    """After a pardon a peer's older word does not count; with two new losses it does again."""
    prompts.learn(KILLER, POOL, [A, B], 600.0, 5.0)
    prompts.pardon(KILLER, POOL, 600.0, 6.0)
    prompts.learn(KILLER, POOL, [A, B], 600.0, 7.0)

    assert prompts.refused(KILLER, 8.0) is None
    assert [(KILLER, 598.0)] == prompts.pardons(POOL, 8.0)
    assert 1 == prompts.ignored
    die(prompts, A, 10.0, KILLER, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, sent_at=11.0)
    prompts.learn(KILLER, POOL, [A, B], 600.0, 13.0)
    assert prompts.refused(KILLER, 13.0)
    prompts.check()


def test_bounds(prompts: DeadlyPrompts) -> None:
    """However much is sent, the tables stay within their bounds; what was seen here finds room."""
    for n in range(MOST_SUSPECTED + 100):
        prompts.learn(prompt(n), POOL, [A, B], 600.0, 1.0)
        prompts.lost(prompt(-n), POOL, WorkerId(f"w{n}"), sent_at=0.0, lost_at=1.0, now=1.0)
        prompts.pardon(prompt(f"p{n}"), POOL, 600.0, 1.0)
    prompts.check()
    assert (MOST_DEADLY, MOST_SUSPECTED) == (len(prompts.condemned), len(prompts.suspects()))
    assert MOST_DEATHS == len(list(prompts.lost_workers(1.0)))

    die(prompts, A, 10.0, KILLER, sent_at=9.0)
    die(prompts, B, 12.0, KILLER, sent_at=11.0)
    assert [KILLER] == judge(prompts, B, 12.0, KILLER)
    assert MOST_DEADLY == len(prompts.condemned)


@pytest.mark.parametrize("seed", range(50))
def test_killer_amid_traffic(seed: int) -> None:
    """One killer among 20 requests on each worker ends three of eight at most; nothing else is refused.

    Lost requests and the killer are sent again at once when they may, wherever chance leads them.
    """
    chance, prompts, now = random.Random(seed), DeadlyPrompts(600.0), 0.0
    alive = [WorkerId(f"w{n}") for n in range(8)]
    in_hand = {worker: {prompt(f"{worker}-{n}") for n in range(20)} for worker in alive}
    waiting, lost = [KILLER], []
    while waiting and not prompts.refused(KILLER, now):
        now += 1.0
        for one in chance.sample(waiting, len(waiting)):
            free = [w for w in alive if not (prompts.is_apart(one) and w in prompts.taken())]
            if free:
                worker = chance.choice(free)
                waiting.remove(one)
                in_hand[worker].add(one)
                prompts.begin(one, worker)
        for dead in [worker for worker in alive if KILLER in in_hand[worker]]:
            alive.remove(dead)
            lost.append(dead)
            died = in_hand.pop(dead)
            die(prompts, dead, now + 0.5, *died, sent_at=now)
            for one in died:
                prompts.end(one)
            for one in died:
                prompts.judge(one, dead, now + 1.0)
            waiting += [one for one in died if not prompts.refused(one, now + 1.0)]
        for one in [one for one in waiting if one != KILLER and chance.random() < 0.2]:
            prompts.answered(one)  # elsewhere
            waiting.remove(one)

    assert [KILLER] == [one.prompt for one in prompts.entries()]
    assert len(lost) <= 3
