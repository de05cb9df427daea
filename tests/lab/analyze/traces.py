"""Small traces with known figures."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from kvrouter.lab.simulate.traces import TraceRequest

ID = 16


def request(at: float, *ids: int, tokens: int = 0, id_tokens: int = ID) -> TraceRequest:
    """A request of whole ids, or of `tokens`."""
    return TraceRequest(at, tokens or id_tokens * len(ids), 10, ids, id_tokens)


def in_groups(sizes: Sequence[int], *, shared: int, own: int, common: int = 0) -> list[TraceRequest]:
    """Requests of groups in turn: `common` ids of all, `shared` ids of the group, then their own."""
    fresh = count(1 << 40)
    made: list[TraceRequest] = []
    for turn in range(max(sizes)):
        for group, size in enumerate(sizes):
            if turn < size:
                ids = [*range(common), *(1000 * (group + 1) + place for place in range(shared))]
                ids += [next(fresh) for _ in range(own)]
                made.append(request(float(len(made)), *ids))
    return made
