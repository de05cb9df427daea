"""KvRouter: by hand, and as a replica among frontends."""

from __future__ import annotations

import asyncio
import random
import uuid
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from kvrouter import Client, KvRouter, PolicySettings, block_hashes, sequence_hashes
from kvrouter.errors import BadRequestError, ConfigError, NoWorkersError
from tests.client.hands import Clock, Hand
from tests.core.worlds import prompt, request
from tests.e2e.fleet import Fleet, running_fleet, until
from tests.policies.guarded_classes import Ends, Fails, Last, NoChoose

PROMPT = list(range(40))


def by_hand(*workers: str, clock: Clock | None = None, **settings: object) -> KvRouter:
    """Blocks of four tokens."""
    router = KvRouter(4, clock=clock or Clock(), **settings)  # type: ignore[arg-type]  # KvRouter's own
    for worker in workers:
        router.add_worker(worker, url=f"http://{worker}", kv_blocks=1000)
    return router


def charged(router: KvRouter, tokens: list[int] = PROMPT) -> dict[str, tuple[float, float]]:
    """Prefill and decode blocks of each worker if it got the prompt."""
    verdicts = router.explain(tokens).verdicts
    return {
        str(one.target.worker_id): (one.terms["prefill_blocks"], one.terms["decode_blocks"])
        for one in verdicts
    }


def test_events_draw() -> None:
    """A worker that publishes the prompt's blocks gets the request."""
    router = by_hand("w1", "w2", "w3")
    for frame in Hand("w2").stores(1, PROMPT[:36]):
        router.apply(frame, "w2")

    with router.route(PROMPT) as placed:
        assert ("w2", 0, "http://w2", 9) == (
            placed.worker_id, placed.rank, placed.url, placed.overlap_blocks
        )  # fmt: skip
        assert {} == placed.headers
        assert ["w1", "w2", "w3"] == [one.target.worker_id for one in placed.candidates]


def test_the_moments_of_a_request() -> None:
    """A booking is charged and active, then only active, grows, and ends. A second call changes nothing."""
    router = by_hand("w1")
    assert {"w1": (1.0, 1.0)} == charged(router, [1, 2, 3, 4])
    placed = router.route(PROMPT)
    assert {"w1": (11.0, 11.0)} == charged(router, [1, 2, 3, 4])
    placed.mark_prefill_completed()
    placed.mark_prefill_completed()
    assert {"w1": (1.0, 11.0)} == charged(router, [1, 2, 3, 4])
    placed.progress(8)
    assert {"w1": (1.0, 13.0)} == charged(router, [1, 2, 3, 4])
    placed.free()
    placed.free()
    assert {"w1": (1.0, 1.0)} == charged(router, [1, 2, 3, 4])


def test_an_error_frees_and_assumes_nothing() -> None:
    """Without events, only the blocks of answered requests count as held."""
    router = by_hand("w1", use_kv_events=False)
    with pytest.raises(ValueError, match="mine"), router.route(PROMPT):
        raise ValueError("mine")
    assert {"w1": (10.0, 10.0)} == charged(router)

    with router.route(PROMPT):
        pass
    assert {"w1": (1.0, 10.0)} == charged(router), "the last block is computed again"


def test_assumptions_expire_by_the_clock() -> None:
    """Assumed blocks expire by the clock, although no task checks it."""
    clock = Clock()
    router = by_hand("w1", clock=clock, use_kv_events=False, ttl_s=10)
    with router.route(PROMPT):
        pass
    clock.now += 11

    assert {"w1": (10.0, 10.0)} == charged(router)


def test_end_of_prefill_is_predicted() -> None:
    """The prefill of a request that is not streamed ends as fast as that of streams has."""
    clock = Clock()
    router = by_hand("w1", clock=clock)
    with router.route(PROMPT) as placed:
        clock.now += 1.0
        placed.mark_prefill_completed()
    whole = router.route([9] * 40, streamed=False)
    clock.now += 0.9
    assert {"w1": (11.0, 11.0)} == charged(router, [1, 2, 3, 4])
    clock.now += 0.2
    assert {"w1": (1.0, 11.0)} == charged(router, [1, 2, 3, 4])
    whole.free()


def test_retry() -> None:
    """A worker that failed the request is excluded; with all excluded, NoWorkersError."""
    router = by_hand("w1", "w2")
    first = router.route(PROMPT)
    first.free()
    assert {"w1", "w2"} == {first.worker_id, router.route(PROMPT, exclude=[first.worker_id]).worker_id}
    with pytest.raises(NoWorkersError, match="failed this request"):
        router.route(PROMPT, exclude=["w1", "w2"])


def test_members() -> None:
    """Without workers, NoWorkersError. A removed worker gets no request; one added again is replaced."""
    router = by_hand()
    with pytest.raises(NoWorkersError):
        router.route(PROMPT)
    router.add_worker("w1", ranks=2)
    router.add_worker("w2")
    router.remove_worker("w1")
    assert ["w2"] == router.worker_ids()
    router.add_worker("w2", url="http://new")
    assert "http://new" == router.route(PROMPT).url


def test_a_pool_that_was_given_up() -> None:
    """All workers have left for longer than a lease; a worker added after that gets requests."""
    router = by_hand("w1")
    router.remove_worker("w1")
    replica = router._replica  # which nobody tells by hand that time passes
    for _ in range(20):
        replica.next_round(1000.0)
    assert {} == replica.routers

    router.add_worker("w2")
    assert "w2" == router.route(PROMPT).worker_id


def test_adapters() -> None:
    """A request for an adapter goes where it is loaded."""
    router = by_hand("w1")
    router.add_worker("w2", lora_names=["a"])

    assert "w2" == router.route(PROMPT, lora_name="a").worker_id
    with pytest.raises(NoWorkersError):
        router.route(PROMPT, lora_name="b")


def test_custom_policy() -> None:
    """A custom class: made once for the pool, its hooks are called, its mistakes do not fail requests."""
    made: list[Last] = []

    def new_policy() -> Last:
        made.append(Last())
        return made[-1]

    router = by_hand("w1", "w2", policy=new_policy)
    with router.route(PROMPT, request_id="r") as placed:
        assert "w2" == placed.worker_id
        placed.mark_prefill_completed()
    (own,) = made
    assert ("routed", "r", "w2/0", 200) == own.calls[-1]
    assert "w2" == by_hand("w1", "w2", policy=Last).route(PROMPT).worker_id

    assert by_hand("w1", policy=Fails).route(PROMPT).worker_id


@pytest.mark.parametrize(("last", "tokens"), [(None, 40), (45, 45)])
def test_output_tokens(last: int | None, tokens: int) -> None:
    """The end hook of a custom policy gets what `free` was called with, else the last progress."""
    policy = Ends()
    placed = by_hand("w1", policy=lambda: policy).route(PROMPT, request_id="a")

    placed.mark_prefill_completed()
    placed.progress(40)
    placed.free(last)

    assert [("a", True, tokens)] == policy.ends


@pytest.mark.parametrize(
    ("policy", "said"),
    [("kvv", "use one of kv, "), (NoChoose, "has no choose"), (lambda: 1 / 0, "ZeroDivisionError")],
)
def test_wrong_policy(policy: object, said: str) -> None:
    """The constructor raises."""
    with pytest.raises(ConfigError, match=said):
        by_hand(policy=policy)


@pytest.mark.parametrize("amount", [-1, float("nan"), float("inf"), "2"])
def test_wrong_amounts(amount: Any) -> None:
    """Weights, temperatures and TTLs must be at least 0, as a setting and for one request."""
    router = KvRouter(16)

    for name in ("overlap_weight", "temperature", "ttl_s"):
        about: dict[str, Any] = {name: amount}
        with pytest.raises(ConfigError, match=f"{name} .*: use a number of at least 0"):
            KvRouter(16, **about)
        if name != "ttl_s":
            with pytest.raises(ConfigError, match=f"{name} .*: use a number of at least 0"):
                router.route([1, 2, 3], **about)


def test_settings_of_a_mode() -> None:
    """A mode takes its settings as one value; a custom class takes none."""
    costs = []
    for weight in (0.0, 7.0):
        router = by_hand("w1", settings=PolicySettings(active_request_weight=weight))
        router.route(PROMPT)
        costs.append(router.explain(PROMPT).verdicts[0].terms["cost"])

    assert 7.0 == costs[1] - costs[0]
    with pytest.raises(ConfigError, match="apply to built-in modes only"):
        by_hand(policy=Last, settings=PolicySettings())


def test_mode_direct() -> None:
    """The request names its target."""
    router = by_hand("w1", "w2", policy="direct")

    assert ["w2", "w1"] == [router.route(PROMPT, target=name).worker_id for name in ("w2", "w1/0")]
    with pytest.raises(NoWorkersError):
        router.route(PROMPT, target="w3")
    with pytest.raises(BadRequestError, match="write <worker_id>"):
        router.route(PROMPT, target="/1")


def test_exclude_is_a_list() -> None:
    """A string would be read as a list of characters and exclude no worker."""
    with pytest.raises(ConfigError, match="exclude 'w1': give a list"):
        KvRouter(16).route([1, 2, 3], exclude="w1")


def test_load_by_hand() -> None:
    """A report replaces the rank's last one, leaves other ranks, and later frames are still applied."""
    router = by_hand()
    router.add_worker("w1", ranks=2)
    hand = Hand("w1")
    for frame in hand.stores(1, PROMPT[:20]):
        router.apply(frame, "w1")
    router.load("w1", 1, running=9)
    router.load("w1", waiting=5)
    router.load("w1", running=3, kv_usage=0.5, metrics={"heat": 2.0})
    for frame in hand.stores(6, PROMPT[20:36], parent=5):
        router.apply(frame, "w1")

    with router.route(PROMPT) as placed:
        first, second = placed.candidates
    assert (3, None, 0.5, {"heat": 2.0}) == (first.running, first.waiting, first.kv_usage, first.metrics)
    assert (9, None) == (second.running, second.waiting)
    assert 9 == first.overlap_blocks
    assert [] == router.missing()


def test_first_bytes_teach() -> None:
    """Streamed first bytes teach weight auto how fast prefill is, here and at a peer; others do not."""
    clock = Clock()
    streamed, whole = by_hand("w1", clock=clock, replica_id="a"), by_hand("w1", clock=clock)
    peer = by_hand("w1", clock=clock, replica_id="b")
    for number in range(8):
        placed = [streamed.route([number] * 40), whole.route([number] * 40, streamed=False)]
        exchange(streamed, "a", peer)
        clock.now += 0.5
        for one in placed:
            one.mark_prefill_completed()
            one.free()
        exchange(streamed, "a", peer)

    here, there, nowhere = (router.explain(PROMPT).verdicts[0].terms for router in (streamed, peer, whole))
    assert 0.02 < here["own_s"] == pytest.approx(there["own_s"]), "it begins with 0.002"
    assert "own_s" not in nowhere


def exchange(sender: KvRouter, name: str, peer: KvRouter) -> None:
    """Deliver what the sender has to publish."""
    for frame in sender.frames():
        peer.receive(frame, name)


def test_peers_by_hand() -> None:
    """A booking counts at a peer from the moment its frame is received until that of its end is."""
    a, b = by_hand("w1", replica_id="a"), by_hand("w1", replica_id="b")
    placed = a.route(PROMPT)
    (frame,) = a.frames()
    assert [] == a.frames()
    assert {"w1": (1.0, 1.0)} == charged(b, [1, 2, 3, 4])
    b.receive(frame, "a")
    b.receive(frame, "a")
    a.receive(frame, "a")
    assert {"w1": (11.0, 11.0)} == charged(b, [1, 2, 3, 4]) == charged(a, [1, 2, 3, 4])

    placed.mark_prefill_completed()
    exchange(a, "a", b)
    assert {"w1": (1.0, 11.0)} == charged(b, [1, 2, 3, 4])
    placed.free()
    exchange(a, "a", b)
    assert {"w1": (1.0, 1.0)} == charged(b, [1, 2, 3, 4])


def test_without_a_replica_id() -> None:
    """A router without peers collects no frames, and takes none."""
    router = by_hand("w1")
    router.route(PROMPT)

    assert [] == router.frames()
    with pytest.raises(ConfigError, match="has no `replica_id`"):
        router.receive(b"", "a")


def test_chance_is_passed() -> None:
    """Decisions repeat with the same chance, also where all workers are equal."""

    def chosen(seed: int) -> list[str]:
        router = by_hand("w1", "w2", "w3", policy="random", chance=random.Random(seed).random)
        return [router.route(PROMPT).worker_id for _ in range(20)]

    assert chosen(1) == chosen(1) != chosen(2)


def test_wrong_loads() -> None:
    """Each error states what is wrong."""
    router = by_hand("w1")
    for wrong, said in (
        ({"waiting": -1}, "waiting -1"),
        ({"kv_usage": 50}, "kv_usage 50"),
        ({"rank": 1}, "w1/1"),
    ):
        with pytest.raises(ConfigError, match=said):
            router.load("w1", **wrong)  # type: ignore[arg-type]  # load's own
    with pytest.raises(ConfigError, match="load of w2/0"):
        router.load("w2")


def test_wrong_arguments() -> None:
    """Each error states what to use."""
    with pytest.raises(ConfigError, match="block_size 0"):
        KvRouter(0)
    with pytest.raises(ConfigError, match="ranks 0"):
        by_hand().add_worker("w1", ranks=0)
    with pytest.raises(ConfigError, match=r"worker_id 'a\.b\.c'"):
        by_hand().add_worker("a.b.c")
    with pytest.raises(ConfigError, match=r"replica_id 'a\.b'"):
        by_hand(replica_id="a.b")


def bookings(fleet: Fleet) -> int:
    """Requests in flight, as known to the first frontend."""
    pools = [router.pool for router in fleet.frontends[0].replica.routers.values()]
    return sum(sum(pool.active.owners().values()) for pool in pools)


async def test_a_replica_among_frontends(nats_url: str) -> None:
    """Bookings are shared in both directions; leaving ends the library's bookings."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=2) as fleet:
        async with KvRouter.connect(nats_url, namespace, "tiny", replica_sync=True) as router:
            with pytest.raises(ConfigError, match="over NATS"):
                router.add_worker("w1")
            placed = router.route(list(range(640)))
            await until(lambda: bookings(fleet) == 1)
            placed.free()
            await until(lambda: bookings(fleet) == 0)
            (theirs,) = fleet.frontends[0].replica.routers.values()
            chain = sequence_hashes(block_hashes(range(640), 16))
            key = theirs.route(request(prompt(chain)), 0.0).key
            fleet.frontends[0].replica_loop.publishing.flush_soon()
            await until(lambda: any(cost[0] > 1 for cost in charged(router, [1] * 16).values()))
            theirs.bookings.free(key)
            router.route(list(range(640)))
            await until(lambda: bookings(fleet) == 1)
        left_at = asyncio.get_running_loop().time()
        await until(lambda: bookings(fleet) == 0)
        assert asyncio.get_running_loop().time() - left_at < 3, "not with the lease, which takes five seconds"


async def test_bodies_are_tokenized_by_engines(nats_url: str, tiny: Path) -> None:
    """A chat in one call: its second turn is placed where the first one ran, with exact overlap.

    By a `Client`, too: its engine reports all of the prompt's blocks as cached.
    """
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=2, engine_model=tiny) as fleet:
        body: dict[str, Any] = {
            "model": "tiny",
            "messages": [{"role": "user", "content": "It was the best of times. " * 40}],
            "max_tokens": 1,
        }
        async with KvRouter.connect(nats_url, namespace, "tiny") as router:
            with await router.route_body(body) as first:
                assert 0 == first.overlap_blocks
                async with fleet.http.post(f"{first.url}/v1/chat/completions", json=body) as response:
                    usage = (await response.json())["usage"]
            await until(lambda: len(router._router.pool.index) == usage["prompt_tokens"] // 16)
            with await router.route_body(body) as again:
                assert first.worker_id == again.worker_id
                assert (usage["prompt_tokens"] - 1) // 16 == again.overlap_blocks
        async with Client(namespace, "tiny", nats=nats_url) as client:
            for _ in range(5):
                (answer,) = [one async for one in client.generate(body)]
                details = answer["usage"]["prompt_tokens_details"]
                assert (usage["prompt_tokens"] - 1) // 16 * 16 == details["cached_tokens"]


def test_a_mode_for_one_request() -> None:
    """The router's own policy places the others."""
    router = KvRouter(16, use_kv_events=False)
    for worker_id in ("w1", "w2"):
        router.add_worker(worker_id)
    with router.route(list(range(160))) as first:
        pass

    chosen = [router.route(list(range(160)), mode="round-robin").worker_id for _ in range(4)]
    named = router.route([], mode="direct", target="w2/0")

    assert {"w1": 2, "w2": 2} == Counter(chosen)
    assert "w2" == named.worker_id
    assert first.worker_id == router.route(list(range(160))).worker_id
    with pytest.raises(ConfigError, match="mode 'fast': use one of"):
        router.route([], mode="fast")


async def test_a_body_without_nats() -> None:
    """Engines that tokenize are known over NATS only."""
    with pytest.raises(ConfigError, match="not on NATS"):
        await KvRouter(16).route_body({"prompt": "hi"})


async def test_error_of_the_block_is_not_wrapped(nats_url: str) -> None:
    """It is not an ExceptionGroup."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=1):
        with pytest.raises(ValueError, match="mine"):
            async with KvRouter.connect(nats_url, namespace, "tiny"):
                raise ValueError("mine")


class FailsOften(Fails):
    """Counts how often."""

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()

    async def refresh(self) -> None:
        self.calls["refresh"] += 1
        await super().refresh()

    def close(self) -> None:
        self.calls["close"] += 1
        super().close()


async def test_refresh_runs_inside_connect(nats_url: str) -> None:
    """A custom policy is refreshed as in a frontend, and closed at the end."""
    namespace = uuid.uuid4().hex
    async with running_fleet(nats_url, namespace, frontends=1, mockers=1):
        own = FailsOften()
        async with KvRouter.connect(nats_url, namespace, "tiny", policy=lambda: own):
            await until(lambda: own.calls["refresh"] > 1)
            assert 0 == own.calls["close"]
        assert 1 == own.calls["close"]


async def test_no_server() -> None:
    """The error after the timeout states why, and what to do."""
    with pytest.raises(NoWorkersError, match=r"not connected to NATS yet.*: NATS is away"):
        async with KvRouter.connect("nats://127.0.0.1:1", "ns", "m", ready_timeout_s=0.2):
            pass
