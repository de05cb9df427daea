"""The Python interface for engines without an adapter: a program announces its own worker.

    async with connect("nats://127.0.0.1:4222") as nats:
        blocks = KvPublisher(nats, "trt-0", block_size=32)
        async with announce(nats, [blocks], url="http://10.0.0.7:8000", model="llama") as worker:
            blocks.stored([11, 12], token_ids)

`python -m kvrouter.worker` watches an engine from outside. Here the engine's own program reports: this module
publishes heartbeats, the card and frames, answers replicas that missed some, and publishes `leave` at the
end.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Collection, Mapping, Sequence

from kvrouter.bus import Bus, NatsOptions, Subjects
from kvrouter.bus.rights import AGENT
from kvrouter.config import open_bus
from kvrouter.core.wire.heartbeats import BOTH, CONNECTORS, DECODE, PREFILL, Card, RankBeat
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.values import url_error
from kvrouter.errors import ConfigError
from kvrouter.version import __version__
from kvrouter.worker.announcer import Announcer
from kvrouter.worker.engines.metrics import RankLoad
from kvrouter.worker.publisher import KvPublisher, ReplayAnswers


@contextlib.asynccontextmanager
async def connect(nats: NatsOptions | str, *, name: str = "worker") -> AsyncIterator[Bus]:
    """A connection to NATS that reconnects by itself. `nats` may have the form of `--nats`."""
    async with open_bus(nats, name=name, user=AGENT) as bus:
        yield bus


@contextlib.asynccontextmanager
async def announce(
    nats: Bus,
    publishers: Sequence[KvPublisher],
    *,
    url: str,
    model: str,
    namespace: str = "default",
    served_names: Sequence[str] = (),
    lora_names: Sequence[str] = (),
    tiers: Mapping[str, int] | None = None,
    rank_header: str = "",
    max_model_len: int = 0,
    max_batched_tokens: int = 0,
    prefill_tokens_per_s: int = 0,
    engine: str = "",
    engine_version: str = "",
    labels: Mapping[str, str] | None = None,
    role: str = BOTH,
    kv_connector: str = "",
    heartbeat_s: float = 1.0,
) -> AsyncIterator[Announcement]:
    """Announce a worker with one publisher per rank, and run them until the block ends.

    `url` is its OpenAI-compatible HTTP server as frontends reach it. `tiers` maps "device" (and "host",
    "disk") to capacities in blocks, 0 meaning unknown: replicas ignore a rank that publishes more.
    `rank_header` is the request header that addresses a rank. `prefill_tokens_per_s`: prompt tokens that a
    rank computes in a second, roughly; replicas assume it until they have measured it. `role` and
    `kv_connector`: of half of a prefill/decode pair (docs/prefill-decode.md).

    Raises ConfigError, and TakenOverError in a group once another program announces the same worker id.
    """
    _check(publishers, url)
    _check_role(role, kv_connector)
    worker_id = publishers[0].worker_id
    card = Card(
        worker_id=worker_id,
        url=url.rstrip("/"),
        model=model,
        served_names=tuple(served_names) or (model,),
        lora_names=tuple(lora_names),
        block_size=publishers[0].block_size,
        ranks=len(publishers),
        rank_header=rank_header,
        tiers=dict(tiers or {"device": 0}),
        max_model_len=max_model_len,
        max_batched_tokens=max_batched_tokens,
        prefill_tokens_per_s=prefill_tokens_per_s,
        engine=engine,
        engine_version=engine_version,
        labels=dict(labels or {}),
        role=role,
        kv_connector=kv_connector,
        started_at_us=publishers[0].incarnation,  # a publisher's incarnation is the time of its start
        agent_version=__version__,
    )
    announcement = Announcement(nats, Subjects(namespace), card, publishers)
    for publisher in publishers:
        publisher.address(model, namespace)
    async with announcement.running(heartbeat_s):
        yield announcement


class Announcement:
    """An announced worker. Call it with the engine's load, and when the engine goes down or comes up."""

    def __init__(self, nats: Bus, subjects: Subjects, card: Card, publishers: Sequence[KvPublisher]) -> None:
        self._nats = nats
        self._subjects = subjects
        self._publishers = publishers
        self._loads: dict[int, RankLoad] = {}
        self._is_open = True
        self.partial: Callable[[], Collection[int]] = tuple
        """The ranks of which not every block was reported; the program itself reports all."""
        self._answers = ReplayAnswers(nats, publishers)
        incarnation = max(publisher.incarnation for publisher in publishers)
        self._announcer = Announcer(nats, subjects, card, incarnation, self._rank_beats)

    def load(
        self,
        rank: int = 0,
        *,
        running: int | None = None,
        waiting: int | None = None,
        kv_usage: float | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Set a rank's load for the next heartbeat: requests, and the fraction 0..1 of its blocks in use.

        `metrics` are additional statistics, for custom policies.
        """
        self._loads[rank] = RankLoad(running, waiting, kv_usage, metrics=metrics or {})

    def down(self) -> None:
        """Announce that the engine takes no requests, and that its caches are empty."""
        for publisher in self._publishers:
            publisher.cleared()
        self._announcer.set_state("down")

    def up(self) -> None:
        """Announce that the engine takes requests again."""
        self._announcer.set_state("up")

    @contextlib.asynccontextmanager
    async def running(self, heartbeat_s: float) -> AsyncIterator[None]:
        """Announce until the end of the block."""
        worker_id = WorkerId(self._publishers[0].worker_id)
        await self._announcer.subscribe()
        await self._nats.subscribe(self._subjects.kv_replay(worker_id), self._on_replay)
        with self._nats.leaving(self._leave):  # around the tasks: no heartbeat follows the last message
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._announcer.run(heartbeat_s))]
                tasks += [group.create_task(publisher.run()) for publisher in self._publishers]
                yield
                for task in tasks:
                    task.cancel()

    def _leave(self) -> None:
        self._is_open = False
        self._announcer.leave()

    def _rank_beats(self) -> list[RankBeat]:
        partial = self.partial()
        return [
            self._loads.get(one.rank, RankLoad()).beat(
                one.rank, one.incarnation, one.seq, is_partial=one.rank in partial
            )
            for one in self._publishers
        ]

    def _on_replay(self, subject: str, payload: bytes, reply: str) -> None:
        if self._is_open:  # the program's own connection stays subscribed after the block
            self._answers.answer(payload, reply)


def _check_role(role: str, kv_connector: str) -> None:
    if role not in {BOTH, PREFILL, DECODE} or (role != BOTH and kv_connector not in CONNECTORS):
        raise ConfigError(
            f"role {role!r} with KV connector {kv_connector!r}: a role is both, prefill or decode, and these "
            f"two need a connector: {' or '.join(CONNECTORS)}"
        )


def _check(publishers: Sequence[KvPublisher], url: str) -> None:
    if [publisher.rank for publisher in publishers] != list(range(len(publishers))) or not publishers:
        raise ConfigError("give one KvPublisher per rank, in order from rank 0")
    if len({(publisher.worker_id, publisher.block_size) for publisher in publishers}) > 1:
        raise ConfigError("the ranks of a worker have one worker_id and one block size")
    if problem := url_error(url):
        raise ConfigError(problem)
