"""GET /workers/ID/blocks: what the index of this replica holds of a worker, as JSON lines.

    first   which replica, pool and worker; per rank: frame, counts and digests as the answer begins
    then    {"rank", "tier", "hashes"}; each block once, with the narrowest tier that has it, in no order
    last    {"next", "ranks"}: where the next page begins, or null; frame, counts and digests at the end

An answer is made shard by shard, between requests. It is exact if the ranks of its first and last line are
equal: nothing was applied in between.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import msgspec

from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.worker import Worker
from kvrouter.core.wire.ids import WorkerId
from kvrouter.core.wire.ops import TIERS
from kvrouter.core.wire.senders import KvSource
from kvrouter.errors import BadRequestError, NoRouteError
from kvrouter.frontend.operators.admin import tier_sets
from kvrouter.relay.answer import AnswerLines
from kvrouter.relay.request import Request

WORKER_PATH = "/workers/"
_BLOCKS = "/blocks"
# Blocks in a line, and in a page by default.
_LINE_BLOCKS = 2000
_PAGE_BLOCKS = 100_000


class WorkerBlocks:
    def __init__(self, replica: Replica) -> None:
        self._replica = replica

    async def view(self, request: Request) -> AnswerLines:
        """`after`: the page to begin with; `limit`: about how many blocks. Raises KvRouterError."""
        worker_id = request.path_after(WORKER_PATH)
        if not worker_id.endswith(_BLOCKS):
            raise NoRouteError(f"{request.head.method} {request.head.route}: Not Found")
        worker_id = worker_id.removesuffix(_BLOCKS)
        pools = [router.pool for router in self._replica.routers.values()]
        pool = next((pool for pool in pools if worker_id in pool.workers), None)
        if pool is None:
            raise NoRouteError(f"no worker {worker_id!r}; /workers lists them")
        limit = _number(request, "limit", _PAGE_BLOCKS)
        if limit < 1:
            raise BadRequestError("limit is 0: use at least 1")
        return AnswerLines(
            self._lines(pool, pool.workers[WorkerId(worker_id)], _number(request, "after", 0), limit)
        )

    def _lines(self, pool: Pool, worker: Worker, after: int, limit: int) -> Iterator[bytes]:
        facts = {"router_id": self._replica.router_id, "pool": pool.id, "worker_id": worker.card.worker_id}
        yield _line(facts | {"block_size": pool.block_size, "ranks": self._ranks(pool, worker)})
        shards, sent = pool.index.shards, 0
        end = len(worker.targets()) * shards
        while after < end and sent < limit:
            rank, shard = divmod(after, shards)
            target = worker.targets()[rank]
            for tier, hashes in zip(TIERS, pool.index.listed(target, shard), strict=False):
                for at in range(0, len(hashes), _LINE_BLOCKS):
                    texts = [f"{hash_:016x}" for hash_ in hashes[at : at + _LINE_BLOCKS]]
                    yield _line({"rank": rank, "tier": tier, "hashes": texts})
                sent += len(hashes)
            after += 1
            yield b""
        yield _line({"next": after if after < end else None, "ranks": self._ranks(pool, worker)})

    def _ranks(self, pool: Pool, worker: Worker) -> list[dict[str, Any]]:
        rows = []
        for target in worker.targets():
            reader = self._replica.readers.get(KvSource(pool.id, target.worker_id, target.rank))
            rows.append(
                {
                    "rank": target.rank,
                    "incarnation": reader.incarnation if reader else 0,
                    "last_seq": reader.seq if reader else 0,
                    "events": reader.state.value if reader else "off",
                    "tiers": list(tier_sets(pool, worker, target)),
                }
            )
        return rows


def _line(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"


def _number(request: Request, name: str, default: int) -> int:
    given = request.in_query(name)
    if given is None:
        return default
    if not (given.isascii() and given.isdecimal() and len(given) < 10):
        raise BadRequestError(f"{name} is {given[:20]!r}: use a number")
    return int(given)
