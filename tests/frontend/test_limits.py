"""Limits of keys: 429s in the form of the API, what is left, and that they hold for the fleet."""

from __future__ import annotations

import asyncio
import json
from collections import Counter

import pytest

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.tables.tenants import KeyLimits
from kvrouter.frontend.keys.limits import FIRST_MEAN
from tests.frontend.clients import ask
from tests.frontend.fleet import BODY, STREAM, Fleet, FleetOf, use_of
from tests.frontend.test_keys import MESSAGE, Ring, ring
from tests.frontend.workers import (
    OK,
    SSE_HEAD,
    Received,
    Wire,
    answer,
    chunk,
    event,
    in_turn,
    says,
    says_and_stalls,
    until,
)
from tests.relay.gates import Gate, numbered, waiting

__all__ = ["ring"]
SYNC = "--router-replica-sync"
LIMITS = KeyLimits(requests=20)


async def test_requests_a_minute(fleet_of: FleetOf, ring: Ring) -> None:
    """All keys of a tenant count together; others, the operator and dry runs do not."""
    limit = ("--requests-per-minute", "3")
    one, two = (
        ring.add("one", "--tenant", "t", *limit, "--override", "dry-run"),
        ring.add("two", "--tenant", "t", *limit),
    )
    other = ring.add("other")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        passed = [await fleet.ask(None, key) for key in (one, two, one)]
        assert [200] * 3 == [each.status for each in passed]
        assert ["2", "1", "0"] == [each.header("x-ratelimit-remaining-requests") for each in passed]
        refused = await fleet.ask(None, two)
        assert (429, "rate_limit_exceeded") == (refused.status, refused.json["error"]["code"])
        assert ("3", "0") == tuple(
            refused.header(f"x-ratelimit-{one}-requests") for one in ("limit", "remaining")
        )
        assert 58 <= int(refused.header("retry-after")) <= 61
        message = await fleet.ask(MESSAGE, two, path="/v1/messages")
        assert (429, "rate_limit_error") == (message.status, message.json["error"]["type"])
        assert "0" == message.header("anthropic-ratelimit-requests-remaining")
        assert message.header("anthropic-ratelimit-requests-reset").endswith("Z")
        assert 429 == (await fleet.ask(MESSAGE, two, path="/v1/embeddings")).status
        assert [200] * 2 == [
            (await fleet.ask(None, key)).status for key in (other, "authorization: Bearer operators")
        ]
        assert 200 == (await fleet.ask(None, one, "x-kvrouter-dry-run: true")).status
        assert not (await fleet.ask(None, other)).headers("x-ratelimit-limit-requests")


async def test_tokens_a_minute(fleet_of: FleetOf, ring: Ring) -> None:
    """Prompt and asked output, or a mean answer, at first; afterwards what was used, also of a stream."""
    key = ring.add("a", "--tokens-per-minute", "1000")
    async with fleet_of(*ring.flags, scripts=(says(answer()),)) as fleet:
        before = 1000
        for body in (BODY, STREAM):
            answered = await fleet.ask(body, key)
            assert 200 == answered.status
            assert before - 64 - 4 == int(answered.header("x-ratelimit-remaining-tokens"))
            await fleet.until_free()
            answered = await fleet.ask({**BODY, "prompt": [1]}, key)
            left = int(answered.header("x-ratelimit-remaining-tokens"))
            assert before - 64 - 4 - 1 - FIRST_MEAN <= left < before - 64
            await fleet.until_free()
            before = _left(fleet)
        refused = await fleet.ask({**BODY, "max_tokens": 900}, key)
        assert 429 == refused.status
        assert "964" in refused.json["error"]["message"]


def _left(fleet: Fleet) -> int:
    """Of 1,000 tokens of tenant `a`."""
    return 1000 - use_of(fleet.frontend.replica).own.tokens


async def test_failed_requests(fleet_of: FleetOf, ring: Ring) -> None:
    """What no worker has done anything for does not count, and a retry counts once; a wrong request does."""
    key = ring.add("a", "--requests-per-minute", "100", "--tokens-per-minute", "100000")
    fails, wrong = says(answer(status=500)), says(answer(status=400))
    async with fleet_of(*ring.flags, "--retries", "1", scripts=(fails, fails)) as fleet:
        assert 500 == (await fleet.ask(None, key)).status
        use = use_of(fleet.frontend.replica)
        assert (0, 0, 0) == (use.own.requests, use.own.tokens, use.at_once)
    async with fleet_of(*ring.flags, "--retries", "1", scripts=(in_turn(fails, OK), OK)) as fleet:
        for _ in range(2):
            assert 200 == (await fleet.ask(None, key)).status
        await fleet.until_free()
        use = use_of(fleet.frontend.replica)
        assert (2, 0) == (use.own.requests, use.at_once)
        assert 2 * 64 <= use.own.tokens <= 2 * (64 + 4)
    async with fleet_of(*ring.flags, scripts=(wrong,)) as fleet:
        assert 400 == (await fleet.ask(None, key)).status
        use = use_of(fleet.frontend.replica)
        assert (1, 1, 0) == (use.own.requests, use.own.tokens, use.at_once)


async def test_no_worker(fleet_of: FleetOf, ring: Ring) -> None:
    """A request that was never sent does not count."""
    key = ring.add("a", "--requests-per-minute", "100")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        fleet.announce(fleet.workers[0], "draining")
        await until(lambda: not fleet.targets(fleet.frontend), "no worker is left")
        assert 503 == (await fleet.ask(None, key)).status
        use = use_of(fleet.frontend.replica)
        assert (0, 0, 0) == (use.own.requests, use.own.tokens, use.at_once)


async def test_burst(fleet_of: FleetOf, ring: Ring) -> None:
    """400 requests at once through four replicas: the limit passes, and at most 10 % more; no fewer."""
    key = ring.add("a", "--requests-per-minute", "100")
    async with fleet_of(*ring.flags, SYNC, scripts=(OK, OK), replicas=4) as fleet:
        await _all_hear(fleet)
        urls = [each.url for each in fleet.frontends] * 100
        statuses = Counter(one.status for one in await asyncio.gather(*(ask(url, BODY, key) for url in urls)))

        assert {200, 429} == statuses.keys()
        assert 100 <= statuses[200] <= 110
        await fleet.until_free()
        assert {statuses[200]} == {_requests(each.replica) for each in fleet.frontends}


async def test_one_sided_burst(fleet_of: FleetOf, ring: Ring) -> None:
    """A burst at one of four replicas gets all of the limit: what is unsure waits."""
    key = ring.add("a", "--requests-per-minute", "100")
    async with fleet_of(*ring.flags, SYNC, scripts=(OK,), replicas=4) as fleet:
        await _all_hear(fleet)
        answers = await asyncio.gather(*(ask(fleet.url, BODY, key) for _ in range(100)))
        assert {200: 100} == Counter(one.status for one in answers)


@pytest.mark.parametrize("synced", [True, False])
async def test_shares(fleet_of: FleetOf, ring: Ring, synced: bool) -> None:
    """Without NATS, or without shared bookings, each of two replicas enforces half of a limit."""
    key = ring.add("a", "--requests-per-minute", "10")
    async with fleet_of(*ring.flags, *([SYNC] if synced else []), scripts=(OK,), replicas=2) as fleet:
        await until(lambda: all(each.replica.peers for each in fleet.frontends), "they know each other")
        _cut_off(fleet)
        for each in fleet.frontends:
            assert [200] * 5 + [429] == [(await ask(each.url, BODY, key)).status for _ in range(6)]


async def test_restart(fleet_of: FleetOf, ring: Ring) -> None:
    """A replica that joins counts what was counted, also by one that has left."""
    key = ring.add("a", "--requests-per-minute", "20")
    async with fleet_of(*ring.flags, SYNC, scripts=(OK,), replicas=1) as fleet:
        async with fleet.new_frontend() as leaving:
            fleet.frontends.append(leaving)
            await _all_hear(fleet, count=1)
            fleet.announce(fleet.workers[0])
            await until(lambda: bool(fleet.targets(leaving)), "it knows the worker")
            for url in (fleet.url, leaving.url):
                assert [200] * 5 == [(await ask(url, BODY, key)).status for _ in range(5)]
            await fleet.until_free()
            fleet.frontends.remove(leaving)
        async with fleet.new_frontend() as joined:
            await until(lambda: _requests(joined.replica) == 10, "it counts ten", 10.0)
            fleet.frontends.append(joined)
            fleet.announce(fleet.workers[0])
            await until(lambda: bool(fleet.targets(joined)), "it knows the worker")
            passed = [(await ask(joined.url, BODY, key)).status for _ in range(11)]
            assert [200] * 10 + [429] == passed
            await fleet.until_free()
            fleet.frontends.remove(joined)


def _requests(replica: Replica) -> int:
    use = use_of(replica)
    return use.own.requests + sum(window.requests for window in use.peers.values())


def _cut_off(fleet: Fleet) -> None:
    """As if NATS was away from now on: what peers let pass is not heard."""
    now = asyncio.get_running_loop().time()
    for each in fleet.frontends:
        each.completions.accept.limits._is_connected = lambda: False
        if SYNC in fleet.flags:
            each.replica.tenants.check("a", LIMITS, 0, now, peers=len(each.replica.peers), hears=False)


async def _all_hear(fleet: Fleet, count: int = 3) -> None:
    await until(
        lambda: all(len(each.replica.peers) >= count for each in fleet.frontends), "all know each other"
    )


async def test_any_number_of_tokens(fleet_of: FleetOf, ring: Ring) -> None:
    """What a client asks for is no number that peers could not read: what others have done arrives, too."""
    greedy, other = (ring.add(name, "--requests-per-minute", "20") for name in ("greedy", "other"))
    async with fleet_of(*ring.flags, SYNC, scripts=(OK,), replicas=2) as fleet:
        first, second = fleet.frontends
        for more in ({"max_tokens": 2**70}, {"n": 2**66, "max_tokens": 2**48}, {"max_tokens": 10**4000}):
            await asyncio.gather(ask(first.url, {**BODY, **more}, greedy), ask(first.url, BODY, other))

        def left() -> int:
            now = asyncio.get_running_loop().time()
            return second.replica.tenants.check("other", LIMITS, 0, now, peers=1, hears=True).requests

        await until(lambda: left() == 17, "the other's three requests are known at the second replica")


async def test_several_answers(fleet_of: FleetOf, ring: Ring) -> None:
    """Each prompt's, and each of `best_of`."""
    key = ring.add("a", "--tokens-per-minute", "10000")
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        body = {**BODY, "prompt": [[1] * 16, [2] * 16], "max_tokens": 100, "best_of": 5}
        answered = await fleet.ask(body, key)

        assert 10000 - 32 - 2 * 5 * 100 == int(answered.header("x-ratelimit-remaining-tokens"))


async def test_left_early(fleet_of: FleetOf, ring: Ring) -> None:
    """A client that leaves in its body, in the queue, before or amid its answer holds no place afterwards."""
    key = ring.add("a", "--requests-at-once", "8")
    gate, queue = Gate(), ("--router-queue-threshold", "0.5", "--router-mode", "kv")

    async def script(received: Received, wire: Wire) -> None:
        begun = says_and_stalls(SSE_HEAD + chunk(event("a")))
        await (begun if received.json["seed"] == 1 else gate.script)(received, wire)

    async with fleet_of(*ring.flags, *queue, scripts=(script,), max_batched_tokens=64) as fleet:
        use = use_of(fleet.frontend.replica)
        async with fleet.connected() as amid, fleet.connected() as queued, fleet.connected() as unread:
            amid.send(json.dumps(numbered(1, stream=True)).encode(), key)
            await amid.read_until(b"data:")
            hung = asyncio.create_task(fleet.ask(numbered(2), key))
            await until(lambda: gate.arrived == [2], "the worker is full")
            queued.send(json.dumps(numbered(3)).encode(), key)
            await until(lambda: waiting(fleet) == 1, "one waits")
            head = b"POST /v1/completions HTTP/1.1\r\nhost: t\r\n%b\r\ncontent-length: 900\r\n\r\n{"
            unread.writer.write(head % key.encode())
            assert 3 == use.at_once
            hung.cancel()
        await until(lambda: not use.at_once, "none holds a place")
        gate.open()
        assert [200] * 8 == [(await fleet.ask(numbered(number + 5), key)).status for number in range(8)]


async def test_background(fleet_of: FleetOf, ring: Ring) -> None:
    """A response that goes on counts what it asks for; where it would hold a place it is refused."""
    tokens, places = ring.add("a", "--tokens-per-minute", "5000"), ring.add("b", "--requests-at-once", "8")
    body = {"model": "m", "input": "x", "background": True, "max_output_tokens": 1000}
    async with fleet_of(*ring.flags, scripts=(OK,)) as fleet:
        assert 200 == (await fleet.ask(body, tokens, path="/v1/responses")).status
        await fleet.until_free()
        assert 1000 < use_of(fleet.frontend.replica).own.tokens < 1100
        assert 403 == (await fleet.ask(body, places, path="/v1/responses")).status
        assert 200 == (await fleet.ask({**body, "background": False}, places, path="/v1/responses")).status
        for key in (tokens, places):  # SGLang goes on with it once the client has left
            assert 403 == (await fleet.ask({"text": "x", "background": True}, key, path="/generate")).status


@pytest.mark.parametrize(
    ("path", "said"),
    [
        ("/v1/embeddings", b'{"data":[],"usage":{"prompt_tokens":40,"total_tokens":40}}'),
        (
            "/generate",
            b'{"text":"x","meta_info":{"prompt_tokens":30,"completion_tokens":10,"cached_tokens":0}}',
        ),
        ("/inference/v1/generate", b'{"choices":[],"usage":{"prompt_tokens":1,"completion_tokens":39}}'),
    ],
)
async def test_usage_of_passed_on(fleet_of: FleetOf, ring: Ring, path: str, said: bytes) -> None:
    """What is passed on counts, once it has ended, what its engine reports."""
    key = ring.add("a", "--tokens-per-minute", "100000")
    async with fleet_of(*ring.flags, scripts=(says(answer(said)),)) as fleet:
        assert 200 == (await fleet.ask({"model": "m", "input": "x " * 500}, key, path=path)).status
        await fleet.until_free()
        assert 40 == use_of(fleet.frontend.replica).own.tokens


async def test_last_known_share(fleet_of: FleetOf, ring: Ring) -> None:
    """Without NATS a replica lets about that part of a limit pass that it had of the tenant's requests."""
    key = ring.add("a", "--requests-per-minute", "100")
    async with fleet_of(*ring.flags, SYNC, scripts=(OK,), replicas=2) as fleet:
        await _all_hear(fleet, count=1)
        for each, count in zip(fleet.frontends, (8, 2), strict=True):
            assert [200] * count == [(await ask(each.url, BODY, key)).status for _ in range(count)]
        await until(lambda: {10} == {_requests(each.replica) for each in fleet.frontends}, "they know")
        _cut_off(fleet)
        for each, most in zip(fleet.frontends, (77, 23), strict=True):  # 90 % as it was, 10 % equally
            asked = [(await ask(each.url, BODY, key)).status for _ in range(most + 1)]
            assert most == use_of(each.replica).own.requests
            assert 429 == asked[-1]
