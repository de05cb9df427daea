"""Ray Serve's request routers by their names, in a running frontend and by themselves."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from kvrouter.compat.ray import (
    FIFOMixin,
    LocalityMixin,
    MultiplexMixin,
    PowerOfTwoChoicesRequestRouter,
    PrefixTreeActor,
    ReplicaID,
    RequestRouter,
    RunningReplica,
    SuspendedError,
    get,
    get_actor,
)
from kvrouter.compat.ray.replicas import pending
from kvrouter.core.routing.policy import RouteRequest
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import Target, WorkerId
from tests.compat import ray_routers
from tests.frontend.fleet import Fleet, FleetOf
from tests.frontend.workers import OK, until

HERE = "tests.compat.ray_routers"
FOX, DOG = "The quick brown fox jumps over", "Lorem ipsum dolor sit amet, consectetur"


def candidate(name: str, loras: tuple[str, ...] = (), requests: int = 0, **facts: Any) -> Any:
    """What the views read of a candidate; its engine runs two sequences at once."""
    card = SimpleNamespace(
        worker_id=name, ranks=1, max_sequences=2, labels=facts.pop("labels", {}), lora_names=loras
    )
    metrics = facts.pop("metrics", {})
    return SimpleNamespace(
        target=Target(WorkerId(name)), loaded_loras=loras, requests=requests, metrics=metrics, card=card
    )


def request(lora: str | None = None, text: str = "") -> RouteRequest:
    """A request for an adapter."""
    return RouteRequest("r", lora_name=lora, text=text)


def names(ranks: Any) -> list[str]:
    """Worker ids in the order in which they are tried: each is a rank of its own."""
    return [one.worker_id for (one,) in ranks]


def guard(fleet: Fleet) -> Any:
    """What holds the router in a frontend, and counts its errors."""
    (router,) = fleet.frontend.replica.routers.values()
    return router.selection.policy


async def ask(fleet: Fleet, prompt: str) -> str:
    """A completion of this text; returns its worker."""
    answer = await fleet.ask({"model": "m", "prompt": prompt, "max_tokens": 4})
    assert 200 == answer.status
    return answer.header("x-kvrouter-worker")


# --- the documents' five, over HTTP ---


async def test_uniform(fleet_of: FleetOf) -> None:
    """All workers are reached."""
    async with fleet_of("--router-policy", f"{HERE}:UniformRequestRouter", scripts=(OK, OK)) as fleet:
        for _ in range(24):
            await ask(fleet, FOX)

        assert {"w0", "w1"} == set(fleet.requests)
        assert not guard(fleet).troubles


async def test_throughput_aware(fleet_of: FleetOf) -> None:
    """The least value of what `record_routing_stats` returns, and agents report with `--metric`, is first."""
    stats = {"w0": 5.0, "w1": 2.0, "w2": 9.0}
    reported = [candidate(name, metrics={"throughput": value}) for name, value in stats.items()]
    options = ("--router-policy", f"{HERE}:ThroughputAwareRequestRouter")
    async with fleet_of(*options, scripts=(OK, OK, OK)) as fleet:
        await ask(fleet, FOX)
        ranks = guard(fleet).policy.choose(request(), reported)

        assert not guard(fleet).troubles
        assert ["w1", "w0", "w2"] == names(ranks)


async def test_stateful(fleet_of: FleetOf) -> None:
    """An asyncio.Lock that nobody holds does not wait; `__init__` calls no other one."""
    async with fleet_of("--router-policy", f"{HERE}:StatefulRouter", scripts=(OK, OK)) as fleet:
        for _ in range(3):
            await ask(fleet, FOX)

        assert ["w1"] * 3 == fleet.requests
        assert [2] * 3 == list(guard(fleet).policy.state.values())


async def test_metric_store(fleet_of: FleetOf) -> None:
    """One that waits is refused with the advice, and requests are served; after the advice it decides."""
    async with fleet_of("--router-policy", f"{HERE}:MetricStoreRouter", scripts=(OK, OK)) as fleet:
        await ask(fleet, FOX)
        assert {"choose": 1} == guard(fleet).troubles
    with pytest.raises(SuspendedError, match="async def refresh"):
        ray_routers.MetricStoreRouter().choose(request(), [candidate("a")])

    options = ("--router-policy", f"{HERE}:RefreshedMetricStoreRouter")
    async with fleet_of(*options, scripts=(OK, OK)) as fleet:
        await until(lambda: guard(fleet).policy.state is not None)
        for _ in range(4):
            await ask(fleet, FOX)
        assert ["w0"] * 4 == fleet.requests
        assert not guard(fleet).troubles


async def test_store_that_never_waits(fleet_of: FleetOf) -> None:
    """What is awaited may be a coroutine of any depth, as long as none of them suspends."""
    async with fleet_of("--router-policy", f"{HERE}:ReadyStoreRouter", scripts=(OK, OK)) as fleet:
        for _ in range(3):
            await ask(fleet, FOX)

        assert ["w0"] * 3 == fleet.requests
        assert not guard(fleet).troubles


async def test_metric_over_http(fleet_of: FleetOf) -> None:
    """What an agent reports with `--metric` is read as routing_stats, the least throughput first."""
    options = ("--router-policy", f"{HERE}:ThroughputAwareRequestRouter")
    async with fleet_of(*options, scripts=(OK, OK)) as fleet:
        for worker, value in zip(fleet.workers, (9.0, 2.0), strict=True):
            fleet.announce(worker, ranks_heard=[RankBeat(0, 1, 0, metrics={"throughput": value})])
        (router,) = fleet.frontend.replica.routers.values()
        await until(lambda: all(one.metrics for one in router.pool.candidates(request())))
        for _ in range(4):
            await ask(fleet, FOX)

        assert {"w1"} == set(fleet.requests)


async def test_chat(fleet_of: FleetOf) -> None:
    """The text of all messages is in `args[0].prompt`."""
    async with fleet_of("--router-policy", f"{HERE}:TextRouter", scripts=(OK,)) as fleet:
        messages = [{"role": "system", "content": DOG}, {"role": "user", "content": FOX}]
        answer = await fleet.ask({"model": "m", "messages": messages}, path="/v1/chat/completions")

        assert 200 == answer.status
        ((seen,),) = guard(fleet).policy.seen
        assert seen.prompt.index(DOG) < seen.prompt.index(FOX)
        assert not hasattr(seen, "messages")


async def test_prefix_cache_affinity(fleet_of: FleetOf) -> None:
    """Equal beginnings go to one worker, others to the one with the smaller tree; a death empties a tree."""
    options = ("--router-policy", f"{HERE}:PrefixCacheAffinityRouter")
    async with fleet_of(*options, scripts=(OK, OK)) as fleet:
        await until(lambda: len(guard(fleet).policy._known) == 2)
        tree = guard(fleet).policy._tree_actor
        texts = FOX, DOG, FOX + " the lazy dog", DOG + " adipiscing", FOX
        first, second, *others = [await ask(fleet, text) for text in texts]

        assert {"w0", "w1"} == {first, second}
        assert [first, second, first] == others
        assert not guard(fleet).troubles

        fleet.announce(fleet.workers[int(first[1])], "leave")
        await until(lambda: get(tree.prefix_match.remote(FOX)) == ("", [f"{second}/0"]))


# --- by themselves ---


def test_mixins_rank_in_three() -> None:
    """By adapter: those that have it, the fewest adapters, others. By distance: node, zone, others."""

    class Mixed(FIFOMixin, MultiplexMixin, LocalityMixin, RequestRouter):
        def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            return self.rank_replicas_via_multiplex(
                candidate_replicas, pending_request.metadata.multiplexed_model_id
            )

    router = Mixed()
    fleet = [
        candidate("other", ("b",)),
        candidate("has", ("a", "b"), labels={"zone": "x"}),
        candidate("bare", labels={"zone": "x", "node": "n"}),
    ]
    replicas = [RunningReplica.of(one) for one in fleet]

    assert ["has", "bare", "other"] == names(router.choose(request("a"), fleet))
    assert [replicas, [], []] == router.rank_replicas_via_locality(replicas)
    router = Mixed(self_node_id="n", self_availability_zone="x")
    ranks = router.rank_replicas_via_locality(replicas)
    assert [["bare/0"], ["has/0"], ["other/0"]] == [[one.replica_id for one in rank] for rank in ranks]
    router = Mixed(self_node_id="n", prefer_local_node_routing=False, self_availability_zone="x")
    ranks = router.rank_replicas_via_locality(replicas)
    assert [[], ["has/0", "bare/0"], ["other/0"]] == [[one.replica_id for one in rank] for rank in ranks]


async def test_place_of_the_frontend(fleet_of: FleetOf) -> None:
    """It is given as arguments of the constructor, which Ray passes itself."""
    options = ["--router-policy", f"{HERE}:ThroughputAwareRequestRouter"]
    for argument in ("self_node_id=n1", "prefer_local_az_routing=false", "self_availability_zone=z"):
        options += ["--router-policy-arg", argument]
    async with fleet_of(*options, scripts=(OK, OK)) as fleet:
        policy = guard(fleet).policy

        assert ("n1", None) == (policy._self_node_id, policy._self_availability_zone)


def test_power_of_two_choices() -> None:
    """Two of the nearest; with an adapter, those that have it."""
    router = PowerOfTwoChoicesRequestRouter()
    fleet = [candidate(f"w{number}", ("a",) if number == 3 else ()) for number in range(5)]

    assert 2 == len(set(names(router.choose(request(), fleet))))
    assert ["w3"] == names(router.choose(request("a"), fleet))


def test_order_in_a_rank() -> None:
    """The shortest queue; of equal ones the first; full ones after all others."""

    class Fixed(RequestRouter):
        def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            return [candidate_replicas[:4], candidate_replicas[4:]]

    fleet = [candidate(name, requests=n) for name, n in [("a", 1), ("b", 2), ("c", 0), ("d", 0), ("e", 1)]]

    assert ["c", "d", "a", "e", "b"] == names(Fixed().choose(request(), fleet))


def test_available_replicas() -> None:
    """Those whose engine has a place; an unknown number of places is endless."""
    full, free, unknown = candidate("a", requests=2), candidate("b", requests=1), candidate("c", requests=99)
    unknown.card.max_sequences = 0
    found = PowerOfTwoChoicesRequestRouter().select_available_replicas(
        [RunningReplica.of(one) for one in (full, free, unknown)]
    )

    assert ["b/0", "c/0"] == [one.replica_id for one in found]


def test_what_a_router_hears() -> None:
    """State once, every rank that comes and dies, attempts that were taken; super() has Ray's arguments."""
    heard: list[Any] = []

    class Hearing(PowerOfTwoChoicesRequestRouter):
        request_router_kwargs: ClassVar = {"threshold": 7}

        def initialize_state(self, threshold: int = 0) -> None:  # type: ignore[override]
            heard.append(threshold)

        def update_replicas(self, replicas: list[RunningReplica]) -> None:
            before = set(self.curr_replicas)
            super().update_replicas(replicas)
            heard.append(sorted(set(self.curr_replicas) ^ before))

        def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
            heard.append((pending_request.metadata.request_id, replica_id, result.status))

        def on_replica_actor_died(self, replica_id: ReplicaID) -> None:
            super().on_replica_actor_died(replica_id)
            heard.append(replica_id)

        def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
            heard.append((internal_request_id, replica_id))

    class Further(Hearing):
        def on_request_routed(self, pending_request: Any, replica_id: Any, result: Any) -> None:
            super().on_request_routed(pending_request, replica_id, result)

    router = Further()
    two, one = candidate("v").card, candidate("w").card
    two.ranks = 2
    router.on_workers([two, one])
    for status in (200, 502, 504, 499):
        router.on_request_routed(request(), Target(WorkerId("w")), status)
    router.on_request_end(request(), Target(WorkerId("w")), None, 1.0, None)
    router.on_worker_removed(WorkerId("v"))
    router.on_workers([two, one])

    every = ["v/0", "v/1", "w/0"]
    assert [7, every, ("r", "w/0", 200), ("r", "w/0"), "v/0", "v/1", every[:2]] == heard
    assert set(every) == router._replica_id_set


def test_smallest_tree_of_a_replica_that_is_no_candidate() -> None:
    """It is found by its id, as in Ray, and one of the candidates is taken."""
    router: Any = ray_routers.PrefixCacheAffinityRouter()
    fleet = [candidate(name) for name in "abc"]
    router.on_workers([one.card for one in fleet])
    for one in fleet[:2]:
        router.on_request_routed(request(text=FOX), one.target, 200)

    assert ["c"] == names(router.choose(request(text=DOG), fleet))
    ((first, second),) = router.choose(request(text=DOG), fleet[:2])
    assert ["a", "b"] == [first.worker_id, second.worker_id]


def test_engine_that_comes_back_at_once() -> None:
    """Its tree is empty, and it is in the tree all the same: the smallest one."""
    router: Any = ray_routers.PrefixCacheAffinityRouter()
    fleet = [candidate(name) for name in "ab"]
    cards = [one.card for one in fleet]
    router.on_workers(cards)
    for one in fleet:
        router.on_request_routed(request(text=FOX), one.target, 200)
    router.on_worker_removed(WorkerId("b"))
    router.on_workers(cards)

    assert ["b"] == names(router.choose(request(text=DOG), fleet))


async def test_whatever_waits_is_refused_with_the_advice() -> None:
    """A future, or a router that waits while it is closed; a future that is done does not wait."""

    class Returning(RequestRouter):
        is_ready = False

        def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            answer = asyncio.get_running_loop().create_future()
            if self.is_ready:
                answer.set_result([list(candidate_replicas)])
                candidate_replicas.clear()
            return answer

    class Closing(RequestRouter):
        async def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            try:
                await asyncio.get_running_loop().create_future()
            finally:
                await asyncio.get_running_loop().create_future()

    fleet = [candidate("a", requests=1), candidate("b")]
    router = Returning()
    for waiting in (router, Closing()):
        with pytest.raises(SuspendedError, match="async def refresh"):
            waiting.choose(request(), fleet)
    router.is_ready = True
    assert ["b", "a"] == names(router.choose(request(), fleet))


def test_wrong_at_the_start() -> None:
    """An argument that no class takes, and a class that cannot choose."""
    with pytest.raises(TypeError, match=r"Uniform.* has no argument 'self_nod_id'; initialize_state gets"):
        ray_routers.UniformRequestRouter(self_nod_id="n1")
    with pytest.raises(TypeError, match="RequestRouter defines no choose_replicas"):
        RequestRouter()
    assert ray_routers.UniformRequestRouter("deployment", self_actor_id="a", max_backoff_s=1.0)


def test_state_that_cannot_be_initialized() -> None:
    """It raises each time, so that the guard decides: a router without its state does not."""

    class Needing(RequestRouter):
        def initialize_state(self, threshold: int) -> None:  # type: ignore[override]
            raise AssertionError("not reached")

        def choose_replicas(self, candidate_replicas: Any, pending_request: Any = None) -> Any:
            return [candidate_replicas]

    router = Needing()
    for _ in range(2):
        with pytest.raises(TypeError, match="threshold"):
            router.choose(request(), [candidate("a")])


def test_all_are_full() -> None:
    """An empty answer means later in Ray; it is a mistake if there is one with a place."""
    router: Any = ray_routers.ThroughputAwareRequestRouter()
    full, free = candidate("full", requests=2), candidate("free")

    assert [[full.target]] == router.choose(request(), [full])
    router.select_available_replicas = lambda candidates: []
    assert [] == router.choose(request(), [full, free])


def test_prefix_tree() -> None:
    """Its methods are called by `remote`, and answer at once."""
    tree = PrefixTreeActor.options(name="t", lifetime="detached").remote()
    get(tree.add_tenants.remote(["a", "b"], 0.0))
    get(tree.insert.remote("hello world", "a", 1.0))

    assert ("hello w", ["a"]) == get(tree.prefix_match.remote("hello w", ["a", "b"]))
    assert ("", ["b"]) == get(tree.prefix_match.remote("hello", ["b"]))
    assert ["b"] == get(tree.get_smallest_tenants.remote())
    assert {"a": 11} == get(tree.remove_tenants.remote(["a", "unknown"]))
    assert not get(tree.start_eviction_loop.remote(1, 1, 1.0))


def test_names_that_are_not_here() -> None:
    """A name of Ray's that there is no counterpart for says where to look; so does a method never called."""
    shown = pending(request(text=FOX))
    replica = RunningReplica.of(candidate("w"))
    for one, name in [(shown, "future"), (shown.metadata, "is_streaming"), (shown.args[0], "messages"),
                      (replica, "actor_id"), (replica.replica_id, "deployment_id")]:  # fmt: skip
        with pytest.raises(AttributeError, match=f"no '{name}' in kvrouter: .* .docs/coming-from-ray.md"):
            getattr(one, name)
    with pytest.raises(AttributeError, match="prompt has the text of all messages"):
        _ = shown.args[0].messages
    with pytest.raises(AttributeError, match="no 'num_pending_requests'; if it is a name of Ray's: docs/"):
        _ = PowerOfTwoChoicesRequestRouter().num_pending_requests
    with pytest.raises(ValueError, match="no actor 'mine'"):
        get_actor("mine")
    with pytest.raises(
        TypeError, match=r"Own.on_new_queue_len_info is not called in kvrouter: RunningReplica"
    ):
        type("Own", (RequestRouter,), {"on_new_queue_len_info": lambda *_: None})


def test_created_at_is_the_time_of_day() -> None:
    """As Ray's: when the request came."""
    now = time.monotonic()

    assert pytest.approx(time.time() - 5, abs=1) == pending(RouteRequest("r", now=now - 5)).created_at


async def test_queue_length_is_not_asked_for() -> None:
    """`get_queue_len` and the cache have the requests in flight; labels are the replica's metadata."""
    router, fleet = ray_routers.UniformRequestRouter(), [candidate("w", requests=3, labels={"gpu": "h100"})]
    router.choose(request(), fleet)
    (replica,) = router.curr_replicas.values()

    assert 3 == await replica.get_queue_len(deadline_s=0.1)
    assert {replica.replica_id: 3} == router.replica_queue_len_cache
    assert {"gpu": "h100"} == replica.replica_metadata


def test_ids() -> None:
    """A text in both directions."""
    replica_id = ReplicaID.from_full_id_str("w/1/2")

    assert Target(WorkerId("w/1"), 2) == replica_id.target
    assert "w/1/2" == replica_id.to_full_id_str() == replica_id.unique_id
