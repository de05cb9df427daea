"""Live traffic as a trace: the decisions that a frontend keeps, with the hashes of their prompts' blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

import msgspec

from kvrouter.core.tables.prefill_speeds import FEW
from kvrouter.lab.simulate.traces import TraceError, TraceRequest
from kvrouter.observe.document import HeldTarget, Workers
from kvrouter.observe.replica import open_replicas
from kvrouter.observe.settings import ReplicaAccess

_MOST = 1000  # what a frontend lists at once


@dataclass(frozen=True, slots=True)
class Live:
    """`blocks_each` 0: no engine has reported it."""

    source: str
    requests: Sequence[TraceRequest]
    workers: int
    blocks_each: int
    block_size: int
    prefill_tokens_per_s: float
    """As the router has measured it; 0: not yet."""


class _Prompt(msgspec.Struct, frozen=True):
    isl: int
    block_size: int
    hashes: Sequence[str]


class _Kept(msgspec.Struct, frozen=True):
    request_id: str
    time: float
    model: str
    prompts: Sequence[_Prompt]


async def read_live(url: str, access: ReplicaAccess, model: str | None) -> Live:
    """The kept decisions of one model and its workers. Raises KvRouterError."""
    async with open_replicas([url], access) as (replica,):
        state = await replica.workers()
        kept = [*await replica.lines(f"/decisions?blocks=true&limit={_MOST}", _Kept)]
    chosen = _model(url, {one.model for one in kept}, model)
    # the oldest first; of several attempts of a request, one
    once = {one.request_id: one for one in reversed(kept) if one.model == chosen}
    requests = _requests([*once.values()])
    if not requests:
        raise TraceError(f"{url}: no kept decision about {chosen} has tokens: the frontend has no tokenizer")
    targets = _targets(state, chosen)
    capacities = [row.capacity_blocks for row in targets if row.capacity_blocks]
    return Live(
        f"decisions about {chosen} kept by {url}",
        requests,
        workers=len(targets),
        blocks_each=sum(capacities) // len(capacities) if capacities else 0,
        block_size=requests[-1].id_tokens,
        prefill_tokens_per_s=_speed(state, chosen),
    )


def _speed(state: Workers, model: str) -> float:
    learnt = [row.prefill for row in state.pools if row.model == model]
    return next((one.tokens_per_s for one in learnt if one.samples >= FEW), 0.0)


def _targets(state: Workers, model: str) -> list[HeldTarget]:
    pools = {row.pool for row in state.pools if row.model == model}
    return [row for row in state.targets if row.pool in pools]


def _model(url: str, known: set[str], model: str | None) -> str:
    if model is None and len(known) > 1:
        raise TraceError(
            f"{url} keeps decisions about several models: --model {' or --model '.join(sorted(known))}"
        )
    if model is not None and model not in known:
        raise TraceError(f"--model {model}: {url} keeps decisions about {', '.join(sorted(known)) or 'none'}")
    if not known:
        raise TraceError(f"{url} keeps no decisions: send requests first, or start it with --decisions N")
    return model or next(iter(known))


def _requests(kept: Sequence[_Kept]) -> list[TraceRequest]:
    """In their order. The block size may have changed: that of the newest decision counts."""
    found = [(one.time, prompt) for one in kept for prompt in one.prompts if prompt.hashes]
    if not found:
        return []
    # each time is worked out when it is asked for, so two may be a millisecond apart in the wrong order
    times = [*accumulate([at for at, _ in found], max)]
    size = found[-1][1].block_size
    return [
        TraceRequest(at - times[0], one.isl, 0, tuple([int(hash_, 16) for hash_ in one.hashes]), size)
        for at, (_, one) in zip(times, found, strict=True)
        if one.block_size == size
    ]
