"""Problems of a worker, each with the change that its sentence asks an operator for."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from kvrouter.core.audit.problems import (
    Problem,
    TokenComparison,
    name_conflicts,
    problems_of,
    problems_of_pool,
)
from kvrouter.core.fleet.pool import Pool, PoolSettings
from kvrouter.core.tables.block_index import IndexBounds
from kvrouter.core.tables.predictions import (
    ANNOUNCE_S,
    LEAST,
    WINDOW,
    PredictionKind,
    PredictionTable,
    Usage,
    WorkerRecord,
)
from kvrouter.core.wire.heartbeats import RankBeat
from kvrouter.core.wire.ids import PoolId
from tests.core.tables.test_predictions import CHAT, TEXT, TOKENS, predicted
from tests.core.worlds import T1, W1, W2, card, chain_from, new_pool, worker_beat

Story = Callable[[PredictionTable], None]


def answers(usage: Usage, blocks: int, count: int = WINDOW, **facts: Any) -> Story:
    """`count` answers with this usage, where `blocks` blocks were predicted."""

    def add_to(truth: PredictionTable) -> None:
        for _ in range(count):
            truth.observe(predicted(blocks, **facts), usage)

    return add_to


def events(found: bool, kind: PredictionKind = TEXT) -> Story:
    """Requests whose blocks events have named, or not."""

    def add_to(truth: PredictionTable) -> None:
        for hash_ in range(LEAST):
            truth.expect(T1, kind, [hash_], 0.0)
        truth.look(ANNOUNCE_S, lambda *_: found)

    return add_to


def record_after(*stories: Story) -> WorkerRecord | None:
    """The record of worker 1 after these stories."""
    truth = PredictionTable()
    for story in stories:
        story(truth)
    return truth.records.get(W1)


def found(pool: Pool, *stories: Story) -> list[Problem]:
    """The problems of worker 1."""
    return problems_of(pool, pool.workers[W1], record_after(*stories))


@pytest.fixture
def pool() -> Pool:
    """One worker of which ten blocks are known."""
    pool = new_pool(card())
    pool.index.store(T1, chain_from(1, 10))
    return pool


RIGHT = answers(Usage(100, 64), 4)
SALTED, ADAPTED = PredictionKind("text", salt=True), PredictionKind("text", lora=True)

CASES: dict[str, tuple[list[Story], str, str]] = {
    "tokenizer": (
        [answers(Usage(90, 0), 0)],
        "tokens",
        r"last 90, here 100\): the tokenizer differs: --model",
    ),
    "template": (
        [answers(Usage(120, 0), 0, kind=CHAT), RIGHT],
        "tokens",
        r"for chats \(last 120.*chat template differs: --model-path",
    ),
    "chats only": ([answers(Usage(120, 0), 0, kind=CHAT)], "tokens", "tokenizer differs.* chat template too"),
    "token ids": ([answers(Usage(101, 0), 0, kind=TOKENS)], "tokens", "engine changes prompts"),
    "another block size": (
        [answers(Usage(100, 72), 0)],
        "block_size",
        "block size 16 .last 72.*--kv-cache-block-size",
    ),
    "hashes of tokens": (
        [events(False, TOKENS)],
        "hashes",
        "for token ids .10 other blocks.*block size differs",
    ),
    "hashes of texts": ([events(False)], "hashes", "for texts .10 other.*tokenizer differs.*block size"),
    "hashes of chats": (
        [events(False, CHAT), events(True)],
        "hashes",
        "for chats .10.*the chat template differs",
    ),
    "blind": ([answers(Usage(100, 64), 0)], "hashes", "for texts"),
    "salt": ([events(False, SALTED), events(True)], "hashes", "do not carry the cache_salt"),
    "salt alone": ([events(False, SALTED)], "hashes", "tokenizer differs.*or its events do not carry"),
    "adapter": ([events(False, ADAPTED), events(True)], "hashes", "LoRA adapters otherwise"),
    "never there": ([answers(Usage(100, 0), 4)], "uncached", "--enable-prefix-caching"),
    "late": (
        [answers(Usage(100, 64), 0), events(True)],
        "inexact",
        "last 64, predicted 0.*do not name in time",
    ),
    "off by two": (
        [answers(Usage(100, 48), 5, LEAST), answers(Usage(100, 32), 4, LEAST)],
        "rule",
        "always 2 blocks less.*nothing needs a restart",
    ),
    "too high": (
        [answers(Usage(100, 32), 4, LEAST), answers(Usage(100, 16), 4, LEAST)],
        "inexact",
        r"16 of the last 16.*last 16, predicted 64.*rule of the engine .*sliding windows",
    ),
    "too high and too low": (
        [answers(Usage(100, 32), 4, LEAST), answers(Usage(100, 64), 3, LEAST), events(True)],
        "inexact",
        "incomplete or come too late.*restart",
    ),
}


@pytest.mark.parametrize("case", CASES)
def test_problem(pool: Pool, case: str) -> None:
    """Each cause is named once, with its remedy."""
    stories, kind, pattern = CASES[case]
    (problem,) = found(pool, *stories)

    assert kind == problem.kind
    assert re.search(pattern, problem.text), problem.text


@pytest.mark.parametrize("case", CASES)
def test_remedy(pool: Pool, case: str) -> None:
    """When the remedy has been applied, right answers and events end the problem."""
    stories, _, _ = CASES[case]
    kinds = [TEXT, CHAT, TOKENS, SALTED, ADAPTED]
    remedied = [
        story for kind in kinds for story in (answers(Usage(100, 64), 4, kind=kind), events(True, kind))
    ]

    assert [] == found(pool, *stories, *remedied)


def test_notes_explain() -> None:
    """What the card says is not predicted exactly is the first thing to look at."""
    pool = new_pool(card(notes=("follows two groups", "pages are pairs: predicted too high")))
    pool.index.store(T1, chain_from(1, 10))
    stories = answers(Usage(100, 32), 4, LEAST), answers(Usage(100, 16), 4, LEAST)

    (problem,) = found(pool, *stories)

    assert problem.text.endswith(
        "its notes say what is not predicted exactly (pages are pairs: predicted too high)"
    )


def test_always_one_block_less(pool: Pool) -> None:
    """That is EAGLE or MTP: predictions follow it from the eighth answer on, so it is no problem."""
    assert [] == found(pool, answers(Usage(100, 48), 4))


def test_one_block_that_is_never_cached(pool: Pool) -> None:
    """One block less of one block is no cache at all, as far as anything shows."""
    assert ["uncached"] == [problem.kind for problem in found(pool, answers(Usage(100, 0), 1))]


CARDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "block_size": ({"block_size": 32}, {"block_size": 16}),
    "no_events": ({"publishes_events": False}, {"publishes_events": True}),
}


@pytest.mark.parametrize("kind", CARDS)
def test_remedy_on_the_card(kind: str) -> None:
    """A problem that the card shows ends with the card that the remedy makes."""
    wrong, right = CARDS[kind]
    pool = new_pool(card("w1", **wrong, started_at_us=2), card("w2", started_at_us=1))
    before = found(pool)
    pool.update(W1, worker_beat(card("w1", **right, started_at_us=3), incarnation=200))

    assert ([kind], []) == ([problem.kind for problem in before], found(pool))


def test_remedies_of_bounds_and_names() -> None:
    """A larger index holds all blocks; another name reaches its own pool."""
    pool = new_pool(card(), index_bounds=IndexBounds(max_blocks=20))
    pool.index.store(T1, chain_from(1, 10))

    assert [] == found(pool)
    assert {} == name_conflicts([pool_of("a", "llama", "sql"), pool_of("b", "qwen", "sql-2")])
    assert [] == found(new_pool(card(prefix_caching=True), use_kv_events=False))


EQUAL = TokenComparison(frozenset({"chat", "text"}))


@pytest.mark.parametrize(
    ("compared", "kind", "pattern"),
    [
        (EQUAL, TEXT, r"for texts .*: an engine's own token ids are equal.*not those of this engine.*kv="),
        (EQUAL, CHAT, "not those of this engine .*--kv-events.*or the block size differs .here 16"),
        (EQUAL, SALTED, "not those of this engine.*or its events do not carry their cache_salt"),
        (TokenComparison(frozenset({"text"})), CHAT, "the chat template differs"),
        (TokenComparison(difference="at position 7: do this"), TEXT, "at position 7: do this"),
    ],
)
def test_events_of_another_engine(
    pool: Pool, compared: TokenComparison, kind: PredictionKind, pattern: str
) -> None:
    """Token ids that an engine has confirmed are not blamed for events that never match."""
    (problem,) = problems_of(pool, pool.workers[W1], record_after(events(False, kind)), compared)

    assert "hashes" == problem.kind
    assert re.search(pattern, problem.text), problem.text
    if kind.prompt in compared.equal:
        assert "tokenizer differs" not in problem.text


def test_tokens_differ() -> None:
    """Ids that differ from an engine's are a problem of the whole pool."""
    assert [] == problems_of_pool(EQUAL)
    assert [Problem("tokens_differ", "do this")] == problems_of_pool(TokenComparison(difference="do this"))
    assert [Problem("unknown_chats", "some")] == problems_of_pool(TokenComparison(unknown="some"))
    (found,) = problems_of_pool(TokenComparison(backend="default: other ids"))
    assert "tokenizer_backend" == found.kind
    assert "default: other ids. fastokens is off until a restart" in found.text


@pytest.mark.parametrize(
    "stories",
    [
        [],
        [RIGHT],
        [events(True)],
        [answers(Usage(100, 0), 0)],
        [answers(Usage(90, 0), 0, count=LEAST - 1)],
        [answers(Usage(90, 64), 4, kind=None)],
    ],
    ids=["nothing", "right", "announced", "no reuse", "too few", "media"],
)
def test_no_problem(pool: Pool, stories: list[Story]) -> None:
    """Right predictions, prompts that are never repeated: all is well."""
    assert [] == found(pool, *stories)


def test_it_passes(pool: Pool) -> None:
    """When predictions are right again the worker has no problem."""
    assert [] != found(pool, answers(Usage(90, 0), 0))
    assert [] == found(pool, answers(Usage(90, 0), 0), RIGHT)


def test_no_event_at_all() -> None:
    """A worker that serves requests and holds no block has no events; the text states how to start them."""
    (problem,) = found(new_pool(card()), events(False))

    assert "no_events" == problem.kind
    assert "--enable-prefix-caching --kv-events-config" in problem.text


def test_agent_without_events() -> None:
    """The card of an agent without events makes the problem known before any request."""
    silent = card(publishes_events=False)

    assert ["no_events"] == [problem.kind for problem in found(new_pool(silent))]
    assert [] == found(new_pool(silent, use_kv_events=False))


def test_without_events() -> None:
    """Without events only lengths and cached tokens count, and the text names the TTL."""
    pool = new_pool(card(publishes_events=False), use_kv_events=False)

    assert [] == found(pool, answers(Usage(100, 64), 0))
    assert [] == found(pool, answers(Usage(100, 48), 4))
    assert "--router-ttl-s" in found(pool, answers(Usage(100, 0), 4))[0].text
    assert "tokens" == found(pool, answers(Usage(90, 0), 0))[0].kind


def test_partial_rank_knows_less(pool: Pool) -> None:
    """After lost history too few blocks are predicted, which `partial` already states."""
    pool.update(W1, worker_beat(ranks=[RankBeat(0, 100, 0, partial=True)]))

    assert [] == found(pool, answers(Usage(100, 64), 3))


def test_worker_of_another_block_size() -> None:
    """No overlap is predicted there; the sentence says which sizes, and what to set."""
    pool = new_pool(card("w1", block_size=32, started_at_us=2), card("w2", started_at_us=1))

    (problem,) = found(pool)
    assert "block_size" == problem.kind
    assert problem.text.startswith("block size 32, pool has 16: no overlap is predicted")
    assert "--kv-cache-block-size" in problem.text
    assert [] == problems_of(pool, pool.workers[W2], None)


def test_worker_of_another_lookahead() -> None:
    """Engines of versions that name blocks otherwise: the reason is the look-ahead, not a block size."""
    pool = new_pool(card("w1", lookahead=1), card("w2", ranks=2))

    (problem,) = problems_of(pool, pool.workers[W1], None)

    assert "look-ahead of 1 token, pool has 0" in problem.text
    assert "one version" in problem.text
    assert "--block-size" not in problem.text


def test_engine_without_a_cache() -> None:
    """Without KV events an engine that says it caches nothing is named, before any request."""
    for use_kv_events, kinds in ((False, ["uncached"]), (True, [])):
        pool = new_pool(card(prefix_caching=False), use_kv_events=use_kv_events)

        assert kinds == [problem.kind for problem in found(pool)]


def test_truncated_worker_is_not_blamed_for_more() -> None:
    """What the index has refused makes events and predictions look wrong: the bound is named, once."""
    pool = new_pool(card(), index_bounds=IndexBounds(max_blocks=2))
    pool.index.store(T1, chain_from(1, 10))

    (problem,) = found(pool, events(False))

    assert "truncated" == problem.kind
    assert "--index-max-blocks" in problem.text


def pool_of(pool_id: str, model: str, *loras: str) -> Pool:
    """A pool with one worker."""
    pool = Pool(PoolId(pool_id), PoolSettings())
    pool.update(W1, worker_beat(card(model=model, lora_names=loras)))
    return pool


def test_name_of_two_pools() -> None:
    """The pool that a name does not reach reports where its requests go, and what to change."""
    llama, qwen = pool_of("a-llama", "llama", "sql", "qwen"), pool_of("b-qwen", "qwen", "sql")
    conflicts = name_conflicts([qwen, llama])

    assert {"a-llama", "b-qwen"} == set(conflicts)
    assert ["'qwen' is also a name in pool b-qwen"] == [text.split(",")[0] for text in conflicts["a-llama"]]
    assert "If these engines are equal" in conflicts["b-qwen"][0]
    assert {} == name_conflicts([llama])
