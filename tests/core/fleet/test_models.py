"""Which pool serves a name."""

from __future__ import annotations

import itertools

import pytest

from kvrouter.core.fleet.models import name_conflicts, pool_serving
from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.wire.ids import PoolId, WorkerId
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError
from tests.core.worlds import card, worker_beat


def pool_of(pool_id: str, model: str, *loras: str) -> Pool:
    """A pool with one worker."""
    pool = Pool(PoolId(pool_id), PoolSettings())
    own = card(f"worker-{pool_id}", model=model, lora_names=loras)
    pool.update(WorkerId(own.worker_id), worker_beat(own))
    return pool


LLAMA, QWEN = pool_of("a-llama", "llama", "sql", "qwen"), pool_of("b-qwen", "qwen", "sql", "poet")


@pytest.mark.parametrize("pools", list(itertools.permutations([LLAMA, QWEN])))
def test_same_answer_everywhere(pools: list[Pool]) -> None:
    """A base model comes before an adapter of its name; adapters of one name go to the first pool."""
    names = ("llama", "qwen", "sql", "poet")

    assert ["a-llama", "b-qwen", "a-llama", "b-qwen"] == [pool_serving(name, pools).id for name in names]


def test_conflicts_are_told() -> None:
    """The pool that a name does not reach says where the requests go, and what to do."""
    conflicts = name_conflicts([QWEN, LLAMA])

    assert {"a-llama", "b-qwen"} == set(conflicts)
    assert ["'qwen' is also a name in pool b-qwen"] == [text.split(",")[0] for text in conflicts["a-llama"]]
    assert "give the model or adapter another name" in conflicts["b-qwen"][0]
    assert {} == name_conflicts([LLAMA])


def test_no_name() -> None:
    """One pool needs no name; with several the client is told to choose, and from what."""
    assert LLAMA is pool_serving(None, [LLAMA])
    with pytest.raises(BadRequestError, match=r"several are served: llama, poet, qwen, sql"):
        pool_serving(None, [LLAMA, QWEN])


def test_unknown() -> None:
    """An unknown name is a 404 with the list; before any worker was seen it is a 503."""
    with pytest.raises(UnknownModelError, match=r"`gpt` does not exist; served: llama"):
        pool_serving("gpt", [LLAMA, QWEN])
    with pytest.raises(NoWorkersError):
        pool_serving("gpt", [Pool(PoolId("x"), PoolSettings())])
