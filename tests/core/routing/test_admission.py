"""The admission queue: when a request waits, in which order, for how long, and how many may."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Sequence

import pytest

from kvrouter.core.routing.admission import SPARE, AdmissionQueue, AdmissionSettings, Ticket
from kvrouter.core.routing.policy import Candidate
from kvrouter.errors import NoWorkersError, QueueFullError
from tests.policies.tables import candidate


def worker(charged: int, batched: int = 1000) -> Candidate:
    """A target with `charged` prefill tokens, whose engine computes `batched` tokens a step."""
    return candidate("w", charged=charged, max_batched_tokens=batched)


FULL, FREE = [worker(2001)], [worker(2001), worker(2000)]


@pytest.fixture
def queue() -> AdmissionQueue:
    """A target is full above twice its step; four requests may wait, for ten seconds."""
    return AdmissionQueue(AdmissionSettings(threshold=2.0, max_waiting=4, max_wait_s=10.0))


def test_saturated_is_strictly_above_on_every_target(queue: AdmissionQueue) -> None:
    """Exactly 2 x 1000 charged tokens is not above; one target below is enough."""
    assert queue.is_saturated(FULL)
    assert not queue.is_saturated(FREE)
    assert not queue.is_saturated([]), "no target at all is another error"


def test_unknown_batch_size_is_never_full(queue: AdmissionQueue) -> None:
    """No request waits for a worker that does not report its batch size."""
    assert not queue.is_saturated([worker(10**9, batched=0)])


def test_off_by_default() -> None:
    """Threshold 0: no request waits."""
    assert not AdmissionQueue(AdmissionSettings()).is_saturated([worker(10**9)])


def test_arrival_order_is_kept(queue: AdmissionQueue) -> None:
    """First come, first served: a request that arrives while others wait goes behind them."""
    first, second = queue.join(0.0), queue.join(1.0)

    assert queue.is_waited_in()
    assert not queue.admit(second, has_room=True)
    assert not queue.admit(first, has_room=False)
    assert queue.admit(first, has_room=True)
    assert queue.admit(second, has_room=True)
    assert not queue.is_waited_in()


def test_equal_arrival_times_keep_order(queue: AdmissionQueue) -> None:
    """Requests that arrive at the same time are ordered by number."""
    tickets = [queue.join(5.0) for _ in range(4)]

    for ticket in tickets:
        assert ticket == queue.first()
        assert queue.admit(ticket, has_room=True)


def test_priority_and_ageing() -> None:
    """A step of priority is worth two seconds: a request 1.9 s later overtakes, one 2.1 s later does not."""
    for later, winner in ((1.9, "high"), (2.1, "low")):
        queue = AdmissionQueue(AdmissionSettings(threshold=1.0, ageing_s=2.0))
        low, high = queue.join(0.0), queue.join(later, priority=-1)

        assert {"low": low, "high": high}[winner] == queue.first()


def test_no_request_starves() -> None:
    """Under a steady stream of priority -5, a request of priority 0 is served after five seconds."""
    queue = AdmissionQueue(AdmissionSettings(threshold=1.0, ageing_s=1.0, max_wait_s=1e9))
    patient, served_at = queue.join(0.0), None
    for step in range(100):
        now = step * 0.1
        queue.join(now, priority=-5)
        first = queue.first()
        assert first is not None
        queue.leave(first)
        if first == patient:
            served_at = now
            break

    assert served_at is not None
    assert pytest.approx(5.0, abs=0.2) == served_at


def test_a_lead_is_bounded() -> None:
    """With any priorities, a request that has waited half of `max_wait_s` goes before a new one."""
    for later, winner in ((14.0, "urgent"), (16.0, "patient")):
        queue = AdmissionQueue(AdmissionSettings(threshold=1.0, max_wait_s=30.0))
        patient, urgent = queue.join(0.0, priority=10**9), queue.join(later, priority=-(10**9))

        assert {"patient": patient, "urgent": urgent}[winner] == queue.first()


def test_lanes_do_not_hold_each_other_up(queue: AdmissionQueue) -> None:
    """A request that waits for an adapter's worker holds up only its lane; `max_waiting` counts all."""
    adapter = queue.join(0.0, lane="adapter")

    assert queue.is_waited_in("adapter")
    assert not queue.is_waited_in()

    base = queue.join(1.0)
    assert [adapter, base] == queue.firsts()
    assert queue.admit(base, has_room=True)
    assert [adapter] == queue.firsts()

    for _ in range(3):
        queue.join(2.0)
    with pytest.raises(QueueFullError):
        queue.join(2.0, lane="adapter")


def test_lanes_end_with_their_last_waiter(queue: AdmissionQueue) -> None:
    """A lane is dropped with its last waiting request."""
    for number in range(1000):
        queue.leave(queue.join(0.0, lane=str(number)))

    assert ([], 0) == (queue.lanes(), len(queue))


def test_ageing_zero_ignores_priority() -> None:
    """Order is by arrival alone."""
    queue = AdmissionQueue(AdmissionSettings(threshold=1.0, ageing_s=0.0))
    first = queue.join(0.0)
    queue.join(0.0, priority=-100)

    assert first == queue.first()


def test_full_queue(queue: AdmissionQueue) -> None:
    """The fifth request gets a 503 with the reason; when another leaves, one more may wait."""
    tickets = [queue.join(0.0) for _ in range(4)]

    with pytest.raises(QueueFullError, match="4 requests in the queue") as refused:
        queue.join(0.0)
    assert 503 == refused.value.status
    assert isinstance(refused.value, NoWorkersError)
    queue.leave(tickets[2])
    queue.join(0.0)


def test_wait_is_bounded(queue: AdmissionQueue) -> None:
    """A request that has waited ten seconds times out; the next one moves up."""
    first, second = queue.join(0.0), queue.join(3.0)

    assert [] == queue.expire(9.9)
    assert [first] == queue.expire(10.0)
    assert second == queue.first()
    assert not queue.admit(first, has_room=True)


def test_client_that_leaves(queue: AdmissionQueue) -> None:
    """Its request leaves the queue, and leaving twice changes nothing."""
    first, second = queue.join(0.0), queue.join(1.0)

    queue.leave(first)
    queue.leave(first)

    assert second == queue.first()
    assert 1 == len(queue)


def test_a_lane_drops_tickets_that_left() -> None:
    """The heap of a lane does not grow with requests that have left."""
    queue = AdmissionQueue(AdmissionSettings(threshold=1.0, max_waiting=10))
    last = queue.join(0.0, priority=1)
    for number in range(10_000):
        queue.leave(queue.join(float(number)))

    assert last == queue.first()
    assert len(queue._lanes[""][""].order) < 200


def test_figures(queue: AdmissionQueue) -> None:
    """The queue reports how many wait, and how long the first one has."""
    assert 0.0 == queue.longest_wait_s(5.0)
    queue.join(1.0)
    queue.join(2.0)

    assert (2, 4.0) == (len(queue), queue.longest_wait_s(5.0))


def test_queues_do_not_wake_in_one_instant(queue: AdmissionQueue) -> None:
    """A replica hesitates up to 2 ms for each peer; without peers not at all."""
    assert (0.0, 0.006, 0.003) == (
        queue.wake_after_s(0, 0.9), queue.wake_after_s(3, 1.0), queue.wake_after_s(3, 0.5)
    )  # fmt: skip


class Served:
    """What tenants were served, as all replicas count it, by their weights."""

    def __init__(self, **weights: float) -> None:
        self.weights, self.tokens = weights, Counter[str]()

    def __call__(self, tenant: str) -> float:
        return self.tokens[tenant] / self.weights.get(tenant, 1.0)


def fair(served: Served, most: int = 10_000) -> AdmissionQueue:
    return AdmissionQueue(AdmissionSettings(threshold=1.0, max_waiting=most), served)


def serve(queue: AdmissionQueue, served: Served, cost: int = 100) -> str:
    """Admit the next request; returns its tenant."""
    ticket = queue.first()
    assert ticket is not None
    assert queue.admit(ticket, has_room=True)
    served.tokens[ticket.tenant] += cost
    return ticket.tenant


def test_tenants_take_turns() -> None:
    """One that sends ten times as much waits for itself, not the others for it."""
    served = Served()
    queue = fair(served)
    for number in range(100):
        queue.join(float(number), tenant="greedy")
    for number in range(10):
        queue.join(100.0 + number, tenant="modest")

    order = [serve(queue, served) for _ in range(110)]

    assert 10 == order[:20].count("modest")
    assert ["greedy"] * 90 == order[20:]


@pytest.mark.parametrize("weight", [1.0, 2.0, 4.0])
def test_weights(weight: float) -> None:
    """Shares are as weights, also of requests that cost more."""
    served = Served(heavy=weight)
    queue = fair(served)
    for number in range(400):
        queue.join(float(number), tenant="heavy")
        queue.join(float(number), tenant="light")
    for _ in range(300):
        ticket = queue.first()
        assert ticket is not None
        serve(queue, served, 300 if ticket.tenant == "heavy" else 100)

    assert weight == pytest.approx(served.tokens["heavy"] / served.tokens["light"], rel=0.05)


@pytest.mark.parametrize("seed", range(10))
def test_no_tenant_starves(seed: int) -> None:
    """Whatever others send, with whatever weight and priority, a request goes within its turns."""
    rng = random.Random(seed)
    served = Served(poor=0.5, **{f"t{number}": rng.choice((1.0, 10.0)) for number in range(5)})
    queue = fair(served)
    for _ in range(50):
        queue.join(0.0, priority=-100, tenant=f"t{rng.randrange(5)}")
    queue.join(0.0, priority=100, tenant="poor")
    turns = 0
    while serve(queue, served, rng.randrange(1, 200)) != "poor":
        turns += 1
        for _ in range(rng.randrange(4)):
            queue.join(float(turns), priority=-100, tenant=f"t{rng.randrange(5)}")
        assert turns < 1000


def test_nothing_is_saved_up() -> None:
    """A tenant that was away begins where those that wait are."""
    served = Served()
    queue = fair(served)
    served.tokens["old"] = 1_000_000
    for number in range(50):
        queue.join(float(number), tenant="old")
    serve(queue, served)
    for number in range(50):
        queue.join(50.0 + number, tenant="new")

    order = [serve(queue, served) for _ in range(40)]

    assert 19 <= order.count("old") <= 21


def test_a_part_of_the_room() -> None:
    """A tenant that floods the queue is refused, and others still join."""
    queue = fair(Served(), most=12)
    for _ in range(6):
        queue.join(0.0, tenant="greedy")
    with pytest.raises(QueueFullError):
        queue.join(0.0, tenant="greedy")
    for tenant in ("a", "b", "c"):
        for _ in range(3):
            queue.join(0.0, tenant=tenant)
    with pytest.raises(QueueFullError):
        queue.join(0.0, tenant="c")


def test_several_replicas() -> None:
    """With shared counts, four queues serve each tenant its share, though one asks at all of them."""
    served = Served()
    queues = [fair(served) for _ in range(4)]
    for queue in queues:
        for number in range(200):
            queue.join(float(number), tenant="greedy")
    for number in range(60):
        queues[0].join(float(number), tenant="modest")
    for turn in range(240):
        serve(queues[turn % 4], served)

    # one of four queues has its requests: there it goes first until it has caught up
    assert 58 <= served.tokens["modest"] / 100 <= 60


def test_lifts_fade() -> None:
    """A tenant that came back long ago is not held back by where it began."""
    served, halvings = Served(), [0]
    queue = AdmissionQueue(AdmissionSettings(threshold=1.0), served, lambda: halvings[0])
    served.tokens["old"] = 2**20
    for number in range(60):
        queue.join(float(number), tenant="old")
        queue.join(float(number), tenant="new")
    halvings[0], served.tokens["old"] = 20, 1  # ten minutes in which others had their turns

    order = [serve(queue, served) for _ in range(40)]

    assert 19 <= order.count("old") <= 21


@pytest.mark.parametrize(("targets", "spare", "left"), [(1, 2, 0), (2, 2, 1), (3, 1, 1), (40, 2, 2)])
def test_leaves_room(targets: int, spare: int, left: int) -> None:
    """A tenant that was served more gets an idle target if others stay idle; a tenant served less any one."""
    queue = fair(Served())
    for idle in range(targets + 1):
        workers = [worker(0 if number < idle else 60, batched=100) for number in range(targets)]
        assert not queue.is_saturated(workers), "up to 100 tokens none is full"
        assert queue.is_saturated(workers, spare=spare) == (idle <= left)
    assert not queue.is_saturated([], spare=spare)


class Engines:
    """They compute prompts of 100 tokens, one after the other, a second each; and their queue."""

    def __init__(self, count: int, *, leaves_room: bool) -> None:
        self.leaves_room = leaves_room
        self.ends: list[list[float]] = [[] for _ in range(count)]
        self.served, self.ttft_s = Served(), list[float]()
        self.queue = fair(self.served, 100)

    def run(self, arrivals: Sequence[tuple[float, str]]) -> None:
        """All that arrives, in order."""
        for at, tenant in arrivals:
            while (ended := min([ends[0] for ends in self.ends if ends], default=at)) < at:
                self._look(ended)
            with contextlib.suppress(QueueFullError):
                self.queue.join(at, tenant=tenant)
            self._look(at)

    def _look(self, now: float) -> None:
        self.ends = [[end for end in ends if end > now] for ends in self.ends]
        while any(self._admits(ticket, now) for ticket in self.queue.in_turn()):
            pass

    def _admits(self, ticket: Ticket, now: float) -> bool:
        served = self.served.tokens
        is_over = served[ticket.tenant] > min(served["modest"], served["flood"])
        targets = [worker(100 * len(ends), batched=100) for ends in self.ends]
        has_room = not self.queue.is_saturated(targets, spare=SPARE * (self.leaves_room and is_over))
        if not self.queue.admit(ticket, has_room=has_room, overtakes=True):
            return False
        served[ticket.tenant] += 100
        ends = min(self.ends, key=lambda one: one[-1] if one else 0.0)
        ends.append((ends[-1] if ends else now) + 1.0)
        if ticket.tenant == "modest":
            self.ttft_s.append(ends[-1] - ticket.arrived)
        return True


def flows(seed: int, *, flood: float, modest: float = 0.5) -> list[tuple[float, str]]:
    rng, found = random.Random(seed), list[tuple[float, str]]()
    for tenant, rate in (("modest", modest), ("flood", flood)):
        at = 0.0
        while rate and (at := at + rng.expovariate(rate)) < 300:
            found.append((at, tenant))
    return sorted(found)


@pytest.mark.parametrize("seed", range(5))
def test_next_to_a_flood(seed: int) -> None:
    """A tenant that sends a quarter of its share hardly waits if another one sends ten times its own."""
    p90 = {}
    for flood, leaves_room in ((0.0, True), (20.0, True), (20.0, False)):
        engines = Engines(4, leaves_room=leaves_room)
        engines.run(flows(seed, flood=flood))
        p90[flood, leaves_room] = sorted(engines.ttft_s)[int(0.9 * len(engines.ttft_s))]

    assert p90[20.0, True] < 1.3 * p90[0.0, True]
    assert p90[20.0, False] > 1.5 * p90[0.0, True]  # turns alone do not help


@pytest.mark.parametrize("modest", [1.0, 2.0, 20.0])
def test_who_leaves_room_does_not_starve(modest: float) -> None:
    """It has half of the engines at least, whatever the other one sends; of two floods each has half."""
    engines = Engines(4, leaves_room=True)
    engines.run(flows(1, flood=20.0, modest=modest))

    served = engines.served.tokens
    assert served["flood"] >= 0.45 * 4 * 300 * 100
    assert modest < 20.0 or 0.9 < served["flood"] / served["modest"] < 1.1
