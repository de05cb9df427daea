"""Problems of workers, in sentences that state the cause and what to change.

    the worker's card ───┐
    its record's alarms ─┴─> problems: one for each cause

A tokenizer that differs makes lengths differ, hashes unknown and predictions wrong. So wrong events and
predictions are reported only where neither the card nor the prompt lengths explain them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from msgspec import Struct

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import listed, pool_serving
from kvrouter.core.routing.worker import Worker
from kvrouter.core.tables.deadly_prompts import Deadly
from kvrouter.core.tables.predictions import KindEvidence, PredictionKind, WorkerRecord
from kvrouter.core.wire.ids import WorkerId
from kvrouter.errors import counted

_START_EVENTS = (
    'start vLLM with --enable-prefix-caching --kv-events-config \'{"enable_kv_cache_events": true, '
    '"publisher": "zmq", "endpoint": "tcp://*:5557", "replay_endpoint": "tcp://*:5657"}\', and its agent '
    "with --kv-events and --kv-replay for these endpoints; or run the frontends with --no-use-kv-events"
)
_TEMPLATE = (
    "the chat template differs: --model-path must hold the template that the engine uses "
    "(vLLM: --chat-template)"
)
# APIs whose requests engines convert to chats, and what they are called.
_CONVERTED = {"messages": "/v1/messages", "responses": "/v1/responses"}
_CONVERSION = "the engine converts them to chats in another way than vLLM 0.32, as this frontend does it"
# Of a card's notes, in the text of a problem.
_MOST_NOTES = 3
# Of workers, in the text of a problem.
_MOST_NAMES = 5
_RULE = (
    "reports always {blocks} less than predicted: the engine computes that much again by a rule of its own "
    "(one block, as with EAGLE and MTP, would be learnt). Its events are right, so nothing "
    "needs a restart; every prediction for it is {blocks} too high"
)
_TOKENIZER = (
    "the tokenizer differs: --model-path must be the directory of the very model that the engine serves"
)


class Problem(Struct, frozen=True):
    """`kind` is one word of a small fixed set, for metrics; `text` is for people."""

    kind: str
    text: str


class TokenComparison(Struct, frozen=True):
    """How the frontend's token ids compare with those of an engine of the pool."""

    equal: frozenset[str] = frozenset()
    """Kinds of prompt (`chat`, `text`) whose ids were equal in the last comparison."""
    difference: str = ""
    """Where ids differ and what to change; empty if they are equal or were not compared."""
    unknown: str = ""
    """Which chats are routed without tokens, though others are not, and why; empty: none."""
    backend: str = ""
    """Why the fast library for token ids was turned off after it was on; empty: it was not."""


NOT_COMPARED = TokenComparison()


def problems_of(
    pool: Pool, worker: Worker, record: WorkerRecord | None, compared: TokenComparison = NOT_COMPARED
) -> list[Problem]:
    """The problems of a worker. Before its first answer it has no `record`."""
    found = list(_of_card(pool, worker))
    if record is None:
        return found
    by_tokens = list(_of_tokens(record))
    if found or by_tokens:
        return found + by_tokens
    return list(_of_events(pool, worker, record, compared))


def problems_of_pool(compared: TokenComparison) -> list[Problem]:
    """Problems of the frontend's tokenizer, which concern all workers of a pool."""
    found = [
        Problem("tokens_differ", compared.difference),
        Problem("unknown_chats", compared.unknown),
        Problem(
            "tokenizer_backend",
            compared.backend
            and f"{compared.backend}. fastokens is off until a restart, and prompts are tokenized by the "
            "reference library: nothing is lost but time. Report the model to its authors, or give "
            "--tokenizer-backend huggingface",
        ),
    ]
    return [problem for problem in found if problem.text]


def never_full(pool: Pool) -> list[WorkerId]:
    """The workers that the admission queue takes as never full: their cards do not say how much they take."""
    return sorted(name for name, worker in pool.workers.items() if not worker.card.max_batched_tokens)


def problems_of_queue(pool: Pool) -> list[Problem]:
    """Why --router-queue-threshold has no effect in a pool."""
    workers = never_full(pool)
    if not workers:
        return []
    more = f" and {len(workers) - _MOST_NAMES} more" if len(workers) > _MOST_NAMES else ""
    return [
        Problem(
            "never_full",
            "--router-queue-threshold has no effect: no request waits while a worker is never full, as are "
            f"{', '.join(workers[:_MOST_NAMES])}{more}, whose cards have no max_batched_tokens; give their "
            "agents --max-num-batched-tokens with the engine's value (vLLM does not report it)",
        )
    ]


def problem_of_prompts(deadly: Sequence[Deadly]) -> Problem | None:
    """Workers of a pool were lost with one request, the last one of those that are refused."""
    if not deadly:
        return None
    last, more = deadly[-1], f", and {counted(len(deadly) - 1, 'more request')}" if len(deadly) > 1 else ""
    return Problem(
        "deadly_prompt",
        f"{counted(len(last.workers), 'worker')} lost on one request ({', '.join(last.workers)}; prompt "
        f"{last.prompt.hex()}{more}): it is refused until --deadly-prompt-ttl-s has passed. Look at the logs "
        "of these engines; DELETE /deadly_prompts/HASH on an admin listener lets it pass",
    )


def problem_of_answers(worker: Worker) -> Problem | None:
    """Why a worker that is up serves nothing."""
    if not worker.first_answers.are_not_found:
        return None
    card, names = worker.card, listed(set(worker.card.names()))
    return Problem(
        "not_found",
        f"answered 404 to all of its first {worker.first_answers.not_found} requests: {card.url} has no "
        f"/v1/chat/completions and /v1/completions, or does not serve what it lists ({names}). Give its "
        "agent the URL under which the engine has them, with the path of a gateway (--engine-url, "
        "--advertise-url), or correct the served names of the engine",
    )


def problem_of_address(pool: Pool, worker: Worker) -> Problem | None:
    """Why a worker that is up gets no request: it is a replica, or was announced again by another agent."""
    worker_id = WorkerId(worker.card.worker_id)
    if (replica := pool.loops.get(worker_id)) is not None:
        return Problem(
            "loop",
            f"has the address of {replica} ({worker.card.url}): requests to it would come back, so it gets "
            "none. Give its agent the URL of an engine (--engine-url, --advertise-url)",
        )
    if (replica := pool.claimed.get(worker_id)) is not None:
        return Problem(
            "loop",
            f"answers as an engine, and {replica} names its address ({worker.card.url}) as its own: it gets "
            "requests. Give one of them another address; if no such replica runs, its heartbeats are forged",
        )
    twin = pool.twins.get(worker_id)
    if twin is None:
        return None
    return Problem(
        "address",
        f"is the same engine as {twin} ({worker.card.url}), which gets its requests: "
        "stop one of the two agents",
    )


def name_conflicts(pools: Iterable[Pool]) -> dict[str, list[str]]:
    """Sentences about names that several pools serve, by the pool whose clients do not reach it."""
    by_id = sorted((pool for pool in pools if pool.names), key=lambda pool: pool.id)
    conflicts: dict[str, list[str]] = {}
    for pool in by_id:
        for name in sorted(pool.names):
            winner = pool_serving(name, by_id)
            if winner is not pool:
                conflicts.setdefault(pool.id, []).append(
                    f"{name!r} is also a name in pool {winner.id}, where all requests for it go. "
                    "If these engines are equal, their agents find one pool in a minute. Else their token "
                    "ids differ, or --model keeps them apart: give one of them another name"
                )
    return conflicts


_ONE_BLOCK_SIZE = (
    "Give all engines of a model one block size (vLLM: --block-size); --kv-cache-block-size of the frontends "
    "must be that one, or be left out"
)
_ONE_LOOKAHEAD = (
    "Give all engines of a model one version and one way of decoding: with EAGLE or MTP vLLM names blocks "
    "otherwise from 0.33 on"
)


def _of_card(pool: Pool, worker: Worker) -> Iterator[Problem]:
    if note := pool.size_note(worker):
        remedy = _ONE_BLOCK_SIZE if worker.card.block_size != pool.block_size else _ONE_LOOKAHEAD
        yield Problem("block_size", f"{note}, it gets requests by its load alone. {remedy}")
    elif worker.has_equal_ids is False:
        yield Problem(
            "tokens_differ",
            "its token ids of chats are not those that are computed here, and those of other engines of its "
            "name may be: no overlap is found on it. Give all engines of a name one model directory and one "
            "chat template (vLLM: --chat-template), or another name",
        )
    elif not pool.settings.use_kv_events and worker.card.prefix_caching is False:
        yield Problem(
            "uncached", "prefix caching is off: no overlap is predicted (vLLM: --enable-prefix-caching)"
        )
    elif any(pool.index.is_truncated(target) for target in worker.targets()):
        yield Problem(
            "truncated",
            "not all of its blocks are known here, the index is full: raise --index-max-blocks or "
            "--index-max-holders, or live with less overlap than there is",
        )
    elif pool.settings.use_kv_events and not worker.card.publishes_events:
        yield Problem("no_events", f"its agent has no KV events, so no overlap is predicted: {_START_EVENTS}")


def _of_tokens(record: WorkerRecord) -> Iterator[Problem]:
    """The engine counts other prompt tokens than the frontend."""
    bad, good = _kinds(record, lambda evidence: evidence.lengths.is_raised, _has_good_lengths)
    if bad:
        theirs, ours = record.last_lengths
        yield Problem(
            "tokens",
            f"counts other prompt tokens than this frontend {_of_kinds(bad)} (last {theirs}, here {ours}): "
            + (_template(bad, good) if _are_all(bad, _is_chat) and good else _tokenizer(bad)),
        )


def _tokenizer(bad: list[PredictionKind]) -> str:
    if _are_all(bad, lambda kind: kind.prompt == "tokens"):  # the frontend did not tokenize these
        return "the engine changes prompts that are sent as token ids"
    return f"{_TOKENIZER}, and its chat template too" if any(map(_is_chat, bad)) else _TOKENIZER


def _of_events(
    pool: Pool, worker: Worker, record: WorkerRecord, compared: TokenComparison
) -> Iterator[Problem]:
    """Its events, or the cached tokens it reports, do not match the predictions."""
    has_events = pool.settings.use_kv_events
    theirs, ours = record.last_cached
    if record.uneven.is_raised:
        yield Problem(
            "block_size",
            f"reports cached tokens that are not a multiple of the block size {pool.block_size} "
            f"(last {theirs}): its blocks have another size; correct --kv-cache-block-size of its agent "
            "and of the frontends",
        )
    elif has_events and (bad := _unmatched(record)):
        yield _unmatched_problem(pool, worker, *bad, compared)
    elif has_events and record.inexact.is_raised and (blocks := _always_short(pool, record)):
        yield Problem("rule", _RULE.format(blocks=counted(blocks, "block")))
    elif record.uncached.is_raised:
        yield Problem(
            "uncached", f"reports 0 cached tokens where blocks were predicted: {_why_uncached(has_events)}"
        )
    elif has_events and record.inexact.is_raised and not _is_partial(worker):
        yield Problem(
            "inexact",
            f"reports other cached tokens than predicted in {record.inexact.bad} of the last "
            f"{counted(record.inexact.total, 'request')} (last {theirs}, predicted {ours}): "
            f"{_why_inexact(worker, record)}",
        )


def _always_short(pool: Pool, record: WorkerRecord) -> int:
    """By how many blocks every prediction was too high, if that is one number; else 0."""
    first, *others = record.misses
    is_one_number = first > 0 and all(miss == first for miss in others) and first % pool.block_size == 0
    return first // pool.block_size if is_one_number and record.last_cached[0] else 0


def _why_inexact(worker: Worker, record: WorkerRecord) -> str:
    # notes that state a cost say what is predicted, or not
    if notes := [note for note in worker.card.notes if "predict" in note][:_MOST_NOTES]:
        return f"its notes say what is not predicted exactly ({'; '.join(notes)})"
    if all(miss <= 0 for miss in record.misses):
        return (
            "it has blocks that its events do not name in time. Look at the lag in /workers; without one, a "
            "tier outside the engine that publishes no events is the likely cause"
        )
    if all(miss >= 0 for miss in record.misses):
        return (
            "it does not use blocks that its events name. If its log shows no lost history, a rule of the "
            "engine is the likely cause (sliding windows, speculative decoding); otherwise restart its agent"
        )
    return (
        "its events are incomplete or come too late; look at the lag in /workers and at the log of its "
        "agent, and restart it"
    )


def _why_uncached(has_events: bool) -> str:
    if has_events:
        return (
            "its cache was lost or is not used (vLLM: --enable-prefix-caching); if it is used, "
            "restart its agent"
        )
    return (
        "prefix caching is off (vLLM: --enable-prefix-caching), or its cache evicts blocks sooner than "
        "--router-ttl-s expects: lower that, or use KV events"
    )


def _unmatched(record: WorkerRecord) -> tuple[list[PredictionKind], list[PredictionKind]] | None:
    """Kinds of request whose blocks no event names, and kinds whose blocks events name."""
    bad, good = _kinds(record, _is_unmatched, lambda evidence: evidence.unannounced.is_well)
    return (bad, good) if bad else None


def _is_unmatched(evidence: KindEvidence) -> bool:
    if evidence.unannounced.is_raised:
        return True
    # The engine had cached what the index did not know. That alone may be lost history, so it counts only
    # while no event has named a block of this kind of request.
    return evidence.blind.is_raised and not evidence.unannounced.is_well


def _unmatched_problem(
    pool: Pool,
    worker: Worker,
    bad: list[PredictionKind],
    good: list[PredictionKind],
    compared: TokenComparison,
) -> Problem:
    held = sum(pool.index.blocks(target) for target in worker.targets())
    if not held:
        return Problem(
            "no_events", f"has served requests, and no KV event has arrived from it: {_START_EVENTS}"
        )
    return Problem(
        "hashes",
        f"its KV events never name the blocks of the requests it served {_of_kinds(bad)} ({held} other "
        f"blocks are known): {_why_unmatched(pool, bad, good, compared)}",
    )


def _why_unmatched(
    pool: Pool, bad: list[PredictionKind], good: list[PredictionKind], compared: TokenComparison
) -> str:
    if _are_all(bad, lambda kind: kind.salt) and any(not kind.salt for kind in good):
        return (
            "its events do not carry the cache_salt of these requests; use an engine version whose events do"
        )
    if _are_all(bad, lambda kind: kind.lora) and any(not kind.lora for kind in good):
        return "its events name these LoRA adapters otherwise: give them the same names everywhere"
    unsure = "; or its events do not carry their cache_salt" if _are_all(bad, lambda kind: kind.salt) else ""
    return _why_hashes_differ(pool, bad, good, compared) + unsure


def _why_hashes_differ(
    pool: Pool, bad: list[PredictionKind], good: list[PredictionKind], compared: TokenComparison
) -> str:
    if any(kind.prompt == "tokens" for kind in bad):  # not tokenized here, so the tokenizer is not the cause
        return (
            f"the block size differs (here {pool.block_size}; --kv-cache-block-size), or the events are "
            "those of another engine (--kv-events of its agent)"
        )
    if _are_all(bad, lambda kind: kind.prompt in compared.equal):
        return (
            "an engine's own token ids are equal, so its events are not those of this engine (correct "
            "--kv-events of its agent, kv= in a list of engines), or the block size differs "
            f"(here {pool.block_size}; --kv-cache-block-size)"
        )
    if compared.difference:
        return compared.difference
    if _are_all(bad, _is_chat):
        return _template(bad, good) if good else f"{_TEMPLATE}; or {_TOKENIZER}"
    return f"{_TOKENIZER}; or the block size does (here {pool.block_size}; --kv-cache-block-size)"


def _is_partial(worker: Worker) -> bool:
    return any(rank.partial for rank in worker.ranks.values())


def _has_good_lengths(evidence: KindEvidence) -> bool:
    return evidence.lengths.is_well


def _kinds(
    record: WorkerRecord, is_bad: Callable[[KindEvidence], bool], is_good: Callable[[KindEvidence], bool]
) -> tuple[list[PredictionKind], list[PredictionKind]]:
    bad = sorted(kind for kind, evidence in record.kinds.items() if is_bad(evidence))
    good = sorted(kind for kind, evidence in record.kinds.items() if is_good(evidence))
    return bad, good


def _is_chat(kind: PredictionKind) -> bool:
    return kind.prompt in {"chat", *_CONVERTED}


def _template(bad: list[PredictionKind], good: list[PredictionKind]) -> str:
    """Why the chats of `bad` differ while `good` do not."""
    is_converted = all(kind.prompt in _CONVERTED for kind in bad)
    return _CONVERSION if is_converted and any(kind.prompt == "chat" for kind in good) else _TEMPLATE


def _are_all(kinds: list[PredictionKind], test: Callable[[PredictionKind], bool]) -> bool:
    """`all`, but False for an empty list."""
    return bool(kinds) and all(test(kind) for kind in kinds)


def _of_kinds(kinds: list[PredictionKind]) -> str:
    """`for chats and texts with cache_salt`."""
    return "for " + " and ".join(_named(kind) for kind in kinds)


def _named(kind: PredictionKind) -> str:
    names = {"chat": "chats", "text": "texts", "tokens": "token ids", **_CONVERTED}
    name = names[kind.prompt]
    return name + (" to LoRA adapters" if kind.lora else "") + (" with cache_salt" if kind.salt else "")
