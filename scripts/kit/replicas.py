"""The state that replicas report in /workers, and whether they agree."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from kvrouter.errors import counted
from scripts.kit.http_client import Client

# Target -> blocks and digest.
Index: TypeAlias = dict[str, tuple[int, str]]


@dataclass(frozen=True, slots=True)
class View:
    """The part of a replica's /workers that is compared."""

    router_id: str
    peers: tuple[str, ...]
    live_targets: int
    index: Index
    # Owner -> bookings, without owners that have none.
    bookings: dict[str, int]
    in_flight: int
    active_blocks: int
    charged_prefill_tokens: int
    prompt_tokens: int
    held_tokens: int
    """Of `prompt_tokens`: held by the target with most of each prompt when it was routed."""

    @property
    def bookings_left(self) -> int:
        return sum(self.bookings.values())

    @property
    def is_idle(self) -> bool:
        """Whether the active table is empty."""
        return not (self.bookings or self.in_flight or self.active_blocks or self.charged_prefill_tokens)


class Replica:
    """One frontend, as seen by an operator."""

    def __init__(self, port: int, admin_port: int, client: Client) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.admin_url = f"http://127.0.0.1:{admin_port}"
        self._client = client

    async def view(self) -> View:
        """Its current state."""
        return _view(await self._client.get_json(f"{self.admin_url}/workers"))


def _view(body: dict[str, Any]) -> View:
    targets: list[dict[str, Any]] = body["targets"]
    cached = [pool["cached"] for pool in body["pools"]]
    owners = [owner for pool in body["bookings"] for owner in pool["owners"].items()]
    return View(
        router_id=body["router_id"],
        peers=tuple(body["namespace_peers"]),
        live_targets=sum(target["eligible"] and target["events"] == "live" for target in targets),
        index={f"{t['worker_id']}/{t['rank']}": (t["blocks"], t["digest"]) for t in targets},
        bookings={router_id: owned["count"] for router_id, owned in owners if owned["count"]},
        in_flight=sum(target["requests_in_flight"] for target in targets),
        active_blocks=sum(target["active_blocks"] for target in targets),
        charged_prefill_tokens=sum(target["charged_prefill_tokens"] for target in targets),
        prompt_tokens=sum(one["prompt_tokens"] for one in cached),
        held_tokens=round(sum(one["prompt_tokens"] * one.get("best", 0.0) for one in cached)),
    )


async def settled(replicas: Sequence[Replica], timeout_s: float = 10.0) -> list[View]:
    """The views once all are idle and equal, or the last ones before the timeout."""
    views = [await replica.view() for replica in replicas]
    try:
        async with asyncio.timeout(timeout_s):
            while disagreements(views):
                await asyncio.sleep(0.1)
                views = [await replica.view() for replica in replicas]
    except TimeoutError:
        pass  # the caller checks the last views
    return views


def disagreements(views: Sequence[View]) -> list[str]:
    """In words, how these views are not idle or not equal; empty if they are both."""
    problems = [
        f"replica {number} still has {counted(view.bookings_left, 'booking')},"
        f" {counted(view.in_flight, 'request')} in flight, {counted(view.active_blocks, 'active block')},"
        f" {counted(view.charged_prefill_tokens, 'charged prefill token')}"
        for number, view in enumerate(views)
        if not view.is_idle
    ]
    for target in sorted({target for view in views for target in view.index}):
        held = {view.index.get(target) for view in views}
        if len(held) > 1:
            problems.append(f"replicas hold different blocks of {target}: {held}")
    return problems
