"""One rank: when its table is trusted, when it begins again, and when it is whole again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import count

import msgpack
import msgspec
import pytest

from kvrouter.worker.blocks.state import RankState
from kvrouter.worker.engines.vllm import VllmAdapter
from kvrouter.worker.publisher import KvPublisher
from kvrouter.worker.rank import CHUNKS, OLD_REPORTS_S, TABLE_FULL, EngineRank
from kvrouter.worker.zmq.ordering import (
    Action,
    Apply,
    Continued,
    EngineStream,
    LostBatches,
    Restarted,
    digest_of,
)
from tests.worker.fakes import FakeBus

CLEARED = {"type": "AllBlocksCleared"}


@dataclass
class Scene:
    """A rank with room for two blocks of one token, and its stream, at the engine's first batch."""

    # long ago, so that no request of the release before may ask for reports
    started_s: float = -10_000.0
    former: RankState | None = None
    capacity_blocks: int = 2
    has_siblings: bool = False
    stream: EngineStream = field(default_factory=lambda: EngineStream(can_replay=True))

    def __post_init__(self) -> None:
        self._seq = count()
        self.rank = EngineRank(
            KvPublisher(FakeBus(), "w", 1, model="m", incarnation=5),
            self.stream,
            self.capacity_blocks,
            started_s=self.started_s,
            former=self.former,
            has_siblings=self.has_siblings,
            adapter=VllmAdapter(),
        )
        if self.former is None:
            self.stream.begin()
            self.stream.replayed(0, [])

    @property
    def count(self) -> int:
        """Distinct blocks published."""
        return self.rank.publisher.blocks.count()

    def apply(self, *events: object, ts: float = 100.0, as_arrays: bool = False, rank: int = 0) -> None:
        """Let the rank apply a batch of events."""
        shaped = [list(event.values()) if as_arrays else event for event in map(_dict, events)]
        self.rank.on_action(Apply(next(self._seq), msgpack.packb([ts, shaped, rank])))

    def send(self) -> None:
        """Send a first frame: a life without one need not end."""
        self.rank.publisher.flush(0.0)


def _dict(event: object) -> dict[str, object]:
    assert isinstance(event, dict)
    return event


def store(*hashes: int, parent: int | None = None) -> dict[str, object]:
    """A chain of blocks of one token."""
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": hashes,
        "block_size": 1,
    }


def remove(*hashes: int) -> dict[str, object]:
    """Remove blocks."""
    return {"type": "BlockRemoved", "block_hashes": hashes, "medium": "GPU"}


@pytest.fixture
def scene() -> Scene:
    """A rank that has published one block."""
    scene = Scene()
    scene.apply(store(1))
    scene.send()
    return scene


def test_apply(scene: Scene) -> None:
    """Batches reach the table; while none is missing the rank is not partial."""
    scene.apply(store(2, parent=1))

    assert 2 == scene.count
    assert not scene.rank.is_partial


def test_missing_batches() -> None:
    """Without a replay the rank is partial from the start, but not while it waits for an answer."""
    scene = Scene(stream=EngineStream(can_replay=False))
    assert scene.rank.is_partial

    scene = Scene()
    scene.stream.begin()
    assert (False, False) == (scene.rank.is_partial, scene.rank.is_settled)


def test_restart(scene: Scene) -> None:
    """A restarted engine has no blocks; the feed's life continues."""
    scene.rank.on_action(Restarted())

    assert (0, 5) == (scene.count, scene.rank.publisher.incarnation)


@pytest.mark.parametrize(
    ("action", "reason"),
    [
        (lambda scene: scene.rank.on_action(LostBatches()), "gap"),
        (lambda scene: scene.rank.on_action(Apply(7, b"\xc1")), "malformed"),
        (lambda scene: scene.apply(store(1, 2, 3)), "overfull"),
    ],
)
def test_lost(scene: Scene, action: Callable[[Scene], None], reason: str) -> None:
    """A gap, an unreadable batch or more blocks than the capacity begin a new life, marked partial."""
    action(scene)

    assert {reason: 1} == scene.rank.losses
    assert 0 == scene.count
    assert scene.rank.publisher.incarnation > 5
    assert scene.rank.is_partial
    assert scene.rank.state() is None


def test_cleared_after_loss() -> None:
    """Once the engine has emptied its cache, or restarted, the loss no longer matters."""
    cleared, restarted = Scene(), Scene()
    for scene in (cleared, restarted):
        scene.rank.on_action(LostBatches())
        assert scene.rank.is_partial
    cleared.apply(CLEARED)
    restarted.rank.on_action(Restarted())

    assert (False, False) == (cleared.rank.is_partial, restarted.rank.is_partial)


def test_evictions_do_not_end_a_loss() -> None:
    """A hot block may stay in the engine's cache, and so unknown, while all others are evicted."""
    scene = Scene()
    scene.rank.on_action(LostBatches())
    scene.apply(remove(*range(70, 90)))

    assert scene.rank.is_partial


def test_all_stores_count(scene: Scene) -> None:
    """A block that is stored twice is there until both copies are removed, also after lost history."""
    for _ in range(2):
        scene.apply(store(1), store(1), remove(1))
        assert 1 == scene.count
        scene.rank.on_action(LostBatches())


@pytest.mark.parametrize("ts", [100.0, OLD_REPORTS_S])
def test_reports_that_the_release_before_asked_for(ts: float) -> None:
    """They may be in the history that a new agent reads, and add no references."""
    scene = Scene(started_s=0.0)
    scene.rank.on_action(LostBatches())
    scene.apply(store(1), store(1), remove(1), ts=ts)
    assert 0 == scene.count

    scene.apply(store(1), store(1), remove(1), ts=OLD_REPORTS_S + 1)
    assert 1 == scene.count


def test_no_reports_of_older_engines() -> None:
    """Before vLLM 0.26, which sends events as maps, every store is real."""
    scene = Scene(started_s=0.0)
    scene.rank.on_action(LostBatches())
    scene.apply(store(1), store(1), as_arrays=True)
    scene.apply(remove(1))

    assert 1 == scene.count


def test_block_size_of_a_life(scene: Scene) -> None:
    """The size of events counts until the engine is another process, also after lost history."""
    publisher = scene.rank.publisher
    assert 1 == publisher.event_block_size
    scene.apply({**store(2, 3), "block_hashes": [7], "block_size": 2})
    scene.apply(store(4))
    scene.rank.on_action(LostBatches())
    assert 2 == publisher.event_block_size

    scene.rank.on_action(Restarted())
    assert 0 == publisher.event_block_size

    scene.apply(store(1))
    scene.rank.go_down()
    assert 0 == publisher.event_block_size


def test_down(scene: Scene) -> None:
    """While the engine is down it has no blocks, and no state is saved."""
    scene.rank.go_down()
    scene.apply(store(1))
    assert (0, False, False) == (scene.count, scene.rank.is_partial, scene.rank.is_settled)

    scene.rank.on_action(Restarted())
    scene.apply(store(1))
    assert (1, True) == (scene.count, scene.rank.is_settled)


def test_state(scene: Scene) -> None:
    """The next agent continues: table, position, and everything that decides whether it is partial."""
    scene.apply(store(2, parent=1), store(9, parent=8), ts=101.0)
    state = scene.rank.state()
    assert state is not None
    after = Scene(former=state)
    assert 0 == after.count
    _continue(after, state)

    assert (2, 1) == (after.count, after.rank.publisher.seq)
    assert state == after.rank.state()
    assert after.rank.is_older_than(100.5)


def test_state_of_a_partial_rank() -> None:
    """It stays partial."""
    scene = Scene()
    scene.rank.on_action(LostBatches())
    scene.apply(store(1))
    state = scene.rank.state()
    assert state is not None

    after = Scene(former=state)
    _continue(after, state)
    assert (1, True) == (after.count, after.rank.is_partial)


def test_state_of_the_release_before(scene: Scene) -> None:
    """Its agent may have let requests ask for reports. They may come for some time, also to a whole rank."""
    state = scene.rank.state()
    assert state is not None
    former = replace(state, head=msgspec.structs.replace(state.head, expects_reports=True))
    after = Scene(former=former, started_s=0.0)
    _continue(after, former)
    after.apply(store(1), store(2), store(2), remove(2))
    assert (1, False) == (after.count, after.rank.is_partial)

    kept = after.rank.state()
    assert kept is not None
    assert not kept.head.expects_reports
    after.apply(store(2), store(2), remove(2), ts=OLD_REPORTS_S + 1)
    assert 2 == after.count


def test_group_is_kept(scene: Scene) -> None:
    """The followed KV group is saved: otherwise its removals would be ignored."""
    scene.apply({**store(2), "group_idx": 1}, ts=101.0)
    state = scene.rank.state()
    assert state is not None
    after = Scene(former=state)
    _continue(after, state)
    after.apply({**remove(2), "group_idx": 1})

    assert 1 == after.count


def _continue(scene: Scene, state: RankState) -> None:
    """Let the engine prove that it is the same process."""
    payload = b"whatever the batch was"
    scene.stream.resume(state.head.seq, digest_of(payload), was_complete=state.head.is_complete)
    actions: list[Action] = [*scene.stream.replayed(state.head.seq, [(state.head.seq, payload)]).actions]
    assert [Continued()] == actions
    scene.rank.on_action(actions[0])


def test_age(scene: Scene) -> None:
    """A table with batches from before the start of the engine's process is older than it."""
    assert not Scene().rank.is_older_than(200.0)

    assert scene.rank.is_older_than(100.5)
    assert not scene.rank.is_older_than(99.5)


def test_skipped(scene: Scene) -> None:
    """What is skipped is counted."""
    scene.apply({"type": "Novelty"})
    scene.apply({"type": "Novelty"})

    assert {"event Novelty": 2} == scene.rank.skipped
    assert ["events skipped: event Novelty"] == scene.rank.notes


def test_events_of_another_rank() -> None:
    """Endpoints in the wrong order: nothing is applied, the rank is partial, a note has the remedy."""
    scene = Scene(has_siblings=True)
    scene.apply(store(1), rank=1)

    assert (0, True) == (scene.count, scene.rank.is_partial)
    (note,) = scene.rank.notes
    assert "events of rank 1 on the endpoint of rank 0" in note


def test_rank_of_an_external_balancer() -> None:
    """An engine with one rank may give it any number (vLLM's external data parallelism does)."""
    scene = Scene()
    scene.apply(store(1), rank=3)

    assert (1, False) == (scene.count, scene.rank.is_partial)


def test_full_table_is_noted() -> None:
    """Stores beyond the table's limit are not counted, which a note states."""
    scene = Scene()
    scene.rank.publisher.blocks.max_known_blocks = 1
    scene.apply(store(1))
    scene.apply({**store(1), "medium": "CPU"})
    scene.rank.publisher.blocks.check()

    assert [TABLE_FULL] == scene.rank.notes
    assert 0 == scene.rank.publisher.blocks.widest_tier


def test_chunks_are_noted() -> None:
    """Chunks of another program are noted, with what they cost; copies of the engine's own blocks are not."""
    scene = Scene()
    scene.apply(store(1))
    scene.apply({**store(1), "medium": "CPU"})
    before = scene.rank.notes
    scene.apply({**store(7), "medium": "CPU"})

    assert ([], [CHUNKS]) == (before, scene.rank.notes)


def test_other_groups_after_a_restart() -> None:
    """A restarted engine may number its KV groups differently: the followed one is found again."""
    scene = Scene()
    scene.apply({**store(1), "group_idx": 1, "kv_cache_spec_kind": "full_attention"})
    scene.rank.on_action(Restarted())
    scene.apply({**store(1), "group_idx": 0, "kv_cache_spec_kind": "full_attention"})

    assert (1, []) == (scene.count, scene.rank.notes)
