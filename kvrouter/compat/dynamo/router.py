"""`KvPushRouter`: a `kvrouter.Client`, and the `KvRouter` in it."""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import structlog

import kvrouter
from kvrouter import Client, PlacedRequest
from kvrouter.client.kv_router import About
from kvrouter.compat.dynamo.runtime import Endpoint, HeldEndpoint
from kvrouter.core.routing.policy import OverlapWeight
from kvrouter.errors import ConfigError, NoWorkersError

log = structlog.get_logger()

# Arguments that have no meaning here, and why.
NOT_NEEDED = {
    "durable_kv_events": "agents number and repeat their own events, without JetStream",
    "router_snapshot_threshold": "agents and peers send a snapshot of their own state; no stream grows",
    "router_reset_states": "a router starts empty and asks agents and peers; nothing is stored",
    "router_max_tree_size": "a worker is assumed to hold a million blocks at most",
    "router_prune_target_ratio": "the least recently used blocks go one by one",
    "router_event_threads": "events are applied in slices of a millisecond between requests",
    "router_track_output_blocks": "output blocks are always counted",
}
# Arguments whose other value would change decisions, with the one that is in effect.
_FIXED: dict[str, tuple[Any, str]] = {
    "router_track_active_blocks": (True, "mode least-loaded of a frontend looks at no blocks"),
    "router_assume_kv_reuse": (True, "blocks of equal prompts are shared"),
    "router_queue_threshold": (None, "a frontend has an admission queue: --router-queue-threshold"),
}
# Of these objects, the names of fields that engines call otherwise. All others have the engines' own names.
_STOP_FIELDS = {"stop_token_ids_hidden": "stop_token_ids"}
_OUTPUT_FIELDS = {"logprobs", "prompt_logprobs", "skip_special_tokens"}


@dataclass(frozen=True, slots=True, kw_only=True)
class KvRouterConfig:
    """How workers are chosen. The default weight is Dynamo's; `auto` is kvrouter's (docs/policies.md)."""

    overlap_score_weight: OverlapWeight = 1.0
    router_temperature: float = 0.0
    use_kv_events: bool = True
    router_replica_sync: bool = False
    router_ttl_secs: float = 120.0
    router_track_active_blocks: bool = True
    router_assume_kv_reuse: bool = True
    router_queue_threshold: float | None = None
    durable_kv_events: bool = False
    router_snapshot_threshold: int | None = 1_000_000
    router_reset_states: bool = False
    router_max_tree_size: int = 1 << 20
    router_prune_target_ratio: float = 0.8
    router_event_threads: int = 1
    router_track_output_blocks: bool = False

    def __post_init__(self) -> None:
        """Log what has no effect. Raises ConfigError for what cannot have the effect it asks for."""
        for one in fields(self):
            value = getattr(self, one.name)
            if one.name in NOT_NEEDED and value != one.default:
                log.info("compat.not_needed", argument=one.name, why=NOT_NEEDED[one.name])
            fixed, remedy = _FIXED.get(one.name, (None, ""))
            if remedy and value != fixed:
                raise ConfigError(f"{one.name}={value!r} is not supported: {remedy}")


class KvPushRouter:
    """The router of an endpoint's namespace. It joins NATS at the first await, as one more replica.

    Worker ids are texts here. A request's `model` chooses among several served ones; the other methods take
    the keyword `model`, which is not needed if there is only one.
    """

    def __init__(
        self, endpoint: Endpoint, block_size: int, kv_router_config: KvRouterConfig | None = None
    ) -> None:
        self._endpoint = endpoint
        self._block_size = block_size
        self._config = kv_router_config or KvRouterConfig()
        self._clients: dict[str | None, HeldEndpoint[Client]] = {}
        self._placed: dict[str, PlacedRequest] = {}

    async def generate(  # noqa: PLR0917  # a published signature
        self,
        token_ids: Sequence[int],
        model: str | None = None,
        stop_conditions: Mapping[str, Any] | None = None,
        sampling_options: Mapping[str, Any] | None = None,
        output_options: Mapping[str, Any] | None = None,
        router_config_override: Mapping[str, Any] | None = None,
        worker_id: str | None = None,
        dp_rank: int | None = None,
        extra_args: Mapping[str, Any] | None = None,
    ) -> AsyncIterator[dict[str, Any]]:
        """An answer in parts with `token_ids`, `text`, `finish_reason`, `index`.

        It is placed and sent when the first part is read. `token_ids` are there if the engine returns them
        (`return_token_ids`, as vLLM). `worker_id`: the only worker that it may go to. Raises ConfigError; the
        stream raises the errors of `kvrouter.Client`.
        """
        body = _body(token_ids, model, stop_conditions, sampling_options, output_options) | dict(
            extra_args or {}
        )
        about = _about(router_config_override)
        if worker_id is not None:
            about["mode"], about["target"] = "direct", str(worker_id)
        if dp_rank is not None:
            if worker_id is None:
                raise ConfigError("dp_rank: give the worker_id, too")
            about["target"] = f"{worker_id}/{dp_rank}"
        client = await self._client(model)
        return _parts(client.generate(body, **about))

    async def best_worker(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> tuple[str, int, int]:
        """`(worker_id, dp_rank, overlap_blocks)`. With a `request_id` it is booked, until `free`."""
        router, about = await self._router(model), _about(router_config_override)
        if request_id is not None:
            if request_id in self._placed:
                raise ConfigError(f"request_id {request_id!r} is in use: free it first")
            about["request_id"] = request_id
            placed = self._placed[request_id] = router.route(token_ids, **about)
            return placed.worker_id, placed.rank, placed.overlap_blocks
        decision = router.explain(token_ids, **about)
        overlap = {one.target: one.candidate.overlap_blocks for one in decision.verdicts if one.candidate}
        if decision.target is None:
            raise NoWorkersError("no worker takes requests")
        return decision.target.worker_id, decision.target.rank, overlap[decision.target]

    async def best_worker_id(
        self,
        token_ids: Sequence[int],
        router_config_override: Mapping[str, Any] | None = None,
        request_id: str | None = None,
        *,
        model: str | None = None,
    ) -> tuple[str, int]:
        """`(worker_id, overlap_blocks)` of `best_worker`."""
        worker_id, _, overlap = await self.best_worker(
            token_ids, router_config_override, request_id, model=model
        )
        return worker_id, overlap

    async def get_potential_loads(
        self, token_ids: Sequence[int], *, model: str | None = None
    ) -> list[dict[str, Any]]:
        """What each worker would have to do if it got the prompt."""
        decision = (await self._router(model)).explain(token_ids)
        return [
            {
                "worker_id": one.target.worker_id,
                "dp_rank": one.target.rank,
                "potential_prefill_tokens": one.candidate.prefill_tokens,
                "potential_decode_blocks": one.candidate.decode_blocks,
            }
            for one in decision.verdicts
            if one.candidate is not None
        ]

    async def mark_prefill_complete(self, request_id: str) -> None:
        """The first token of a request that `best_worker` booked has come."""
        self._booked(request_id).mark_prefill_completed()

    async def free(self, request_id: str) -> None:
        """A request that `best_worker` booked has ended."""
        self._booked(request_id).free()
        del self._placed[request_id]

    def _booked(self, request_id: str) -> PlacedRequest:
        if request_id not in self._placed:
            raise ConfigError(f"request_id {request_id!r}: best_worker has not booked it, or it was freed")
        return self._placed[request_id]

    async def _router(self, model: str | None) -> kvrouter.KvRouter:
        return (await self._client(model)).router

    async def _client(self, model: str | None) -> Client:
        held = self._clients.get(model)
        if held is None:
            held = self._clients[model] = self._endpoint.runtime.holds(lambda: self._opened(model))
        return await held.get()

    @contextlib.asynccontextmanager
    async def _opened(self, model: str | None) -> AsyncIterator[Client]:
        config = self._config
        async with Client(
            self._endpoint.namespace,
            model,
            nats=self._endpoint.runtime.nats,
            overlap_weight=config.overlap_score_weight,
            temperature=config.router_temperature,
            use_kv_events=config.use_kv_events,
            ttl_s=config.router_ttl_secs,
            replica_sync=config.router_replica_sync,
        ) as client:
            if client.router.block_size != self._block_size:
                raise ConfigError(
                    f"block_size {self._block_size}: the workers have {client.router.block_size}"
                )
            yield client


KvRouter = KvPushRouter
"""The name in later versions."""


def _body(
    token_ids: Sequence[int],
    model: str | None,
    stop: Mapping[str, Any] | None,
    sampling: Mapping[str, Any] | None,
    output: Mapping[str, Any] | None,
) -> dict[str, Any]:
    """The completion request of an engine. Fields that are None are left out."""
    try:
        prompt = array("I", token_ids).tolist()
    except (TypeError, OverflowError) as error:  # a text would be a list of prompts, one for each character
        raise ConfigError(f"token_ids: {error}; use numbers from 0 to 4294967295") from None
    body: dict[str, Any] = {"prompt": prompt, "stream": True, "return_token_ids": True}
    for name, value in (stop or {}).items():
        body[_STOP_FIELDS.get(name, name)] = value
    body |= sampling or {}
    for name, value in (output or {}).items():
        if value and name not in _OUTPUT_FIELDS:
            raise ConfigError(f"output_options {name}: use one of {', '.join(sorted(_OUTPUT_FIELDS))}")
        body |= {name: value} if name in _OUTPUT_FIELDS else {}
    body |= {"model": model} if model is not None else {}
    return {name: value for name, value in body.items() if value is not None}


def _about(override: Mapping[str, Any] | None) -> About:
    given = {name: value for name, value in (override or {}).items() if value is not None}
    if unknown := sorted(given.keys() - {"overlap_score_weight", "router_temperature"}):
        known = "overlap_score_weight, router_temperature"
        raise ConfigError(f"router_config_override {unknown[0]!r}: use one of {known}")
    about = About()
    if "overlap_score_weight" in given:
        about["overlap_weight"] = given["overlap_score_weight"]
    if "router_temperature" in given:
        about["temperature"] = given["router_temperature"]
    return about


async def _parts(chunks: AsyncIterator[dict[str, Any]]) -> AsyncIterator[dict[str, Any]]:
    """The choices of an answer's chunks, as Dynamo's engines return them."""
    async for chunk in chunks:
        for choice in chunk.get("choices", ()):
            known = {name: choice[name] for name in ("token_ids",) if choice.get(name) is not None}
            facts = {"index": choice["index"], "finish_reason": choice.get("finish_reason")}
            yield {**facts, "text": choice.get("text", ""), **known}
