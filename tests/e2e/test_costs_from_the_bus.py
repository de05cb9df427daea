"""A subscriber that knows only docs/reference/wire.md computes the cost of each worker, for any weight."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import struct
import uuid
from collections import defaultdict
from collections.abc import AsyncIterator, Sequence
from typing import Any

import msgspec
import nats
import pytest
from nats.aio.msg import Msg

from kvrouter.core.wire.hashes import block_hashes, sequence_hashes
from kvrouter.lab.mocker.engine import EngineConfig, Timing
from tests.e2e.fleet import PATIENCE_S, Fleet, running_fleet
from tests.frontend.workers import until_found

BLOCK = 16
# The first token of a prompt comes soon, the next one never: what was sent stays as it is.
STILL = Timing(decode_seq_s=1e6)
SLOPE = 7.8e-7  # docs/concepts/decide.md
STORED, REMOVED, CLEARED = 1, 2, 3
ADD_REQUEST, MARK_PREFILL_COMPLETED, FREE, PROGRESS = 16, 17, 18, 19


class Subscriber:
    """Everything that the bus has said of blocks and bookings: no part of kvrouter reads it."""

    def __init__(self) -> None:
        self.blocks: defaultdict[str, set[int]] = defaultdict(set)
        self.bookings: dict[tuple[str, int], list[Any]] = {}
        self.computing: set[tuple[str, int]] = set()

    async def take(self, message: Msg) -> None:
        """One message of `kvrouter.<ns>.live.>`."""
        kind, *named = message.subject.split(".")[3:]
        if kind not in {"kv", "sync"}:
            return
        _, _, _, ops = msgspec.msgpack.decode(message.data)
        for code, *fields in ops:
            if kind == "kv":
                self._blocks_of(named[-2], code, fields)
            else:
                self._bookings_of(named[-1], code, fields)

    def _blocks_of(self, worker: str, code: int, fields: list[Any]) -> None:
        if code == STORED:
            self.blocks[worker].update(hashes_in(fields[2]))
        elif code == REMOVED:
            self.blocks[worker].difference_update(hashes_in(fields[1]))
        elif code == CLEARED:
            self.blocks[worker].clear()

    def _bookings_of(self, router: str, code: int, fields: list[Any]) -> None:
        key = router, fields[0]
        if code == ADD_REQUEST:
            self.bookings[key] = fields
            self.computing.add(key)
        elif code == MARK_PREFILL_COMPLETED:
            self.computing.discard(key)
        elif code == FREE:
            self.computing.discard(key)
            self.bookings.pop(key, None)

    async def count(self) -> int:
        """How many bookings there are."""
        return len(self.bookings)

    def charged(self, worker: str) -> int:
        """Tokens of prefill that are computed there or wait."""
        return sum(booking[7] for key, booking in self._of(worker) if key in self.computing)

    def context(self, worker: str) -> int:
        """Tokens of the prompts that have been computed there."""
        return sum(booking[5] for key, booking in self._of(worker) if key not in self.computing)

    def _of(self, worker: str) -> list[tuple[tuple[str, int], list[Any]]]:
        return [(key, booking) for key, booking in self.bookings.items() if booking[2] == worker]

    def terms(self, worker: str, prompt: Sequence[int]) -> tuple[float, int]:
        """`prefill_blocks` and `decode_blocks` of a prompt there, by docs/concepts/design.md#cost."""
        own = self._of(worker)
        active = {hash_ for _, booking in own for hash_ in hashes_in(booking[4])}
        nameless = sum(booking[8] if len(booking) > 8 else 0 for _, booking in own)
        hashes = sequence_hashes(block_hashes(prompt, BLOCK))
        in_flight = held_of(hashes, active)
        reused = min(max(held_of(hashes, self.blocks[worker]), in_flight), (len(prompt) - 1) // BLOCK)
        prefill_tokens = self.charged(worker) + len(prompt) - reused * BLOCK
        return prefill_tokens / BLOCK, len(active) + nameless + len(prompt) // BLOCK - in_flight


def hashes_in(packed: bytes) -> tuple[int, ...]:
    """The hashes of an op."""
    return struct.unpack(f"<{len(packed) // 8}Q", packed)


def held_of(hashes: Sequence[int], held: set[int]) -> int:
    """How many of the prompt's blocks, from the first on, are among these."""
    return sum(1 for _ in itertools.takewhile(held.__contains__, hashes))


@pytest.fixture
async def heard(nats_url: str) -> AsyncIterator[tuple[Fleet, Subscriber]]:
    """Two frontends, four engines that answer with one token, and the subscriber."""
    namespace, subscriber = uuid.uuid4().hex, Subscriber()
    connection = await nats.connect(nats_url)
    await connection.subscribe(f"kvrouter.{namespace}.live.>", cb=subscriber.take)
    engine = EngineConfig(num_blocks=2049, max_num_seqs=2, timing=STILL)
    async with running_fleet(nats_url, namespace, engine=engine) as fleet:
        yield fleet, subscriber
    await connection.close()


@contextlib.asynccontextmanager
async def streams(fleet: Fleet, prompts: Sequence[Sequence[int]]) -> AsyncIterator[None]:
    """These prompts in flight, half of them at each frontend. Two per engine compute; the others wait."""
    async with asyncio.TaskGroup() as tasks:
        sent = [
            tasks.create_task(_stream(fleet, fleet.frontends[at % 2].url, prompt, 500))
            for at, prompt in enumerate(prompts)
        ]
        yield
        for one in sent:
            one.cancel()


async def _stream(fleet: Fleet, url: str, prompt: Sequence[int], max_tokens: int) -> None:
    body = {"model": "tiny", "prompt": list(prompt), "max_tokens": max_tokens, "stream": True}
    async with fleet.http.post(f"{url}/v1/completions", json=body) as response:
        await response.read()


async def shown(fleet: Fleet, frontend: int, prompt: Sequence[int], weight: str) -> dict[str, Any]:
    """The terms of each worker, as one frontend judges a prompt now."""
    url = f"{fleet.frontends[frontend].admin_url}/v1/route"
    headers = {"x-kvrouter-overlap-weight": weight}
    body = {"model": "tiny", "prompt": list(prompt)}
    async with fleet.http.post(url, json=body, headers=headers) as response:
        answer = await response.json()
        assert 200 == response.status, answer
    return {row["worker_id"]: row["terms"] for row in answer["candidates"]}


async def prefill_speed(fleet: Fleet, frontend: int) -> dict[str, Any]:
    """What one frontend has learnt of it: nobody can know that from the bus alone."""
    (pool,) = (await fleet.workers(frontend))["pools"]
    found: dict[str, Any] = pool["prefill"]
    return found


def prompt_of(group: int, length: int, own: int) -> list[int]:
    """A prompt that shares four blocks with its group."""
    return [*range(group * 1000, group * 1000 + 64), *range(50_000 + 100 * own, 50_000 + 100 * own + length)]


async def test_every_weight(heard: tuple[Fleet, Subscriber]) -> None:
    """Both replicas show the terms and the cost that KV events and bookings alone give.

    Seconds also need the speed of prefill. How long a prefill has run, and arrivals, are not compared.
    """
    fleet, subscriber = heard
    for number in range(24):  # from here on prefill has a speed, which `auto` compares
        await _stream(fleet, fleet.frontends[number % 2].url, prompt_of(3, 90, number), 1)
    prompts = [prompt_of(number % 3, 17 * number, number) for number in range(14)]
    asked = [prompt_of(0, 40, 0), prompt_of(1, 0, 0), prompt_of(2, 300, 7), prompt_of(9, 31, 1)]

    async def equal_terms() -> list[bool]:
        return [
            subscriber.terms(worker, prompt) == (terms["prefill_blocks"], terms["decode_blocks"])
            for prompt, frontend in itertools.product(asked, range(2))
            for worker, terms in (await shown(fleet, frontend, prompt, "1")).items()
        ]

    async with streams(fleet, prompts):
        await until_found(subscriber.count, lambda count: count == 14)
        await until_found(equal_terms, all, within_s=PATIENCE_S)
        assert 4 <= 14 - len(subscriber.computing) < 14
        for prompt, frontend, weight in itertools.product(asked, range(2), ("0", "0.5", "1", "3", "auto")):
            rows = await shown(fleet, frontend, prompt, weight)
            assert 4 == len(rows)
            for worker, terms in rows.items():
                prefill_blocks, decode_blocks = subscriber.terms(worker, prompt)
                assert (prefill_blocks, decode_blocks) == (terms["prefill_blocks"], terms["decode_blocks"])
                if weight != "auto":
                    assert float(weight) * prefill_blocks + decode_blocks == pytest.approx(terms["cost"])
                    continue
                seconds, speed = terms["seconds"], await prefill_speed(fleet, frontend)
                token_s = (1 + SLOPE * subscriber.context(worker)) / speed["tokens_per_s"]
                own_s = speed["fixed_s"] + (BLOCK * prefill_blocks - subscriber.charged(worker)) * token_s
                assert own_s == pytest.approx(seconds["own_prefill"], rel=1e-3, abs=6e-5)  # as it is rounded
                assert bool(subscriber.charged(worker)) == (seconds["waiting"] > 0)
                parts = seconds["waiting"] + seconds["own_prefill"] * (1 + terms["gamma"])
                assert parts == pytest.approx(seconds["total"])
