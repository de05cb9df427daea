"""What is known of one request, from its arrival to its end.

arrived ──accept──> work ──place──> attempt ──first byte──> … ──> ended
└── another worker ──┘            │
read once: metrics, /clients, access log, trace <─────┘
"""

from __future__ import annotations

from typing import Literal, TypeAlias

from msgspec import Struct

from kvrouter.core.fleet.router import Placement
from kvrouter.core.wire.ids import Target
from kvrouter.frontend.accept import Work
from kvrouter.frontend.notes import Notes
from kvrouter.relay.answer import Served
from kvrouter.relay.request import Request
from kvrouter.telemetry.metrics import TargetCounts

# The status of a request whose client has left.
CLIENT_LEFT = 499

Ending: TypeAlias = Literal["ok", "refused", "failed", "broken", "left"]
"""refused: 4xx, of router or worker, and any error outside the APIs' routes; failed: 5xx; broken: after the
first byte; left: the client did."""


class Running(Struct):
    """An attempt: a request at a worker."""

    work: Work
    placement: Placement
    # The targets that it must not move to; None: no retry is left, so it stays.
    excluded: frozenset[Target] | None
    model: str
    """The label of its model in metrics."""
    counts: TargetCounts
    """Of its target."""
    notes: Notes
    # The length of the answer, once it has ended; None: not known.
    output_tokens: int | None = None
    prompt_tokens: int = 0
    """0: its tokens are not known."""
    overlap_tokens: int = 0
    """Predicted to be cached."""
    sent_at: float = 0.0
    is_lost: bool = False
    """Whether its worker was lost with it in hand."""
    is_refused: bool = False
    """Whether its worker refused the connection at once."""
    first_at: float = 0.0
    """When its first data came; 0: not yet, or it is not streamed."""


class Record(Struct):
    """One request. Times are those of decisions, in seconds; `notes` has finer ones."""

    request: Request
    id: str
    received_at: float
    notes: Notes
    work: Work | None = None
    """None: it was not accepted."""
    attempts: list[Running] = []
    """The workers that it was sent to, in turn."""
    served: Served | None = None
    """None: it is not over, or its client left."""
    error: Exception | None = None
    """Why this replica answered in place of a worker."""
    ended_at: float = 0.0

    @property
    def lasted_s(self) -> float:
        """From its arrival to its end."""
        return self.ended_at - self.received_at

    @property
    def status(self) -> int:
        """The status that its client got."""
        return CLIENT_LEFT if self.served is None else self.served.status

    def ending(self) -> Ending:
        """How it ended."""
        served = self.served
        if served is None:
            return "left"
        if served.failure or served.needs_reset:
            return "broken"
        if served.status < 400:
            return "ok"
        return "refused" if served.status < 500 else "failed"


def ending_without_worker(status: int, *, is_api: bool) -> Ending:
    """Alerts count `failed`: one dashboard too many (503) or HTTP/2 (505) is no failed request of a user."""
    return "failed" if is_api and status >= 500 else "refused"
