"""Custom policies, right and wrong, which `--router-policy` names in tests."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvrouter import Candidate, Card, Choice, Policy, RouteRequest, Target
from kvrouter.core.wire.ids import WorkerId


class Last(Policy):
    """Takes the last candidate by name, and records its calls."""

    def __init__(
        self, greeting: str = "", weight: float = 1.0, flag: bool = False, at: Path | None = None
    ) -> None:
        self.arguments = (greeting, weight, flag, at)
        self.calls: list[tuple[Any, ...]] = []

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        return candidates[-1]

    def on_workers(self, workers: Sequence[Card]) -> None:
        self.calls.append(("workers", [card.worker_id for card in workers]))

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        self.calls.append(("routed", request.request_id, str(target), status))

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        self.calls.append(("removed", worker_id))

    def close(self) -> None:
        self.calls.append(("close",))


class Returns(Policy):
    """Returns the value it was made with."""

    def __init__(self, answer: object) -> None:
        self.answer = answer

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer  # type: ignore[return-value]  # a wrong answer is wanted


class Alone:
    """Has only `choose`, and does not derive from Policy."""

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Target:
        return candidates[0].target


class Fails(Policy):
    """Raises in every method."""

    refresh_s = 0.01

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        raise RuntimeError("in choose")

    def on_workers(self, workers: Sequence[Card]) -> None:
        raise RuntimeError("in on_workers")

    def on_request_routed(self, request: RouteRequest, target: Target, status: int) -> None:
        raise RuntimeError("in on_request_routed")

    def on_worker_removed(self, worker_id: WorkerId) -> None:
        raise RuntimeError("in on_worker_removed")

    async def refresh(self) -> None:
        raise RuntimeError("in refresh")

    def close(self) -> None:
        raise RuntimeError("in close")


class NotMade(Alone):
    """Cannot be constructed."""

    def __init__(self) -> None:
        raise OSError("no such store")


class NoChoose(Policy):
    """Has no choose."""


class AsyncChoose:
    """Has an async choose, as Ray's policies do."""

    async def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Target:
        return candidates[0].target


class FewArguments:
    """Has a choose with too few arguments."""

    def choose(self, candidates: Sequence[Candidate]) -> Target:
        return candidates[0].target


class PlainRefresh(Alone):
    """Has a refresh that is not async."""

    refresh_s = 1.0

    def refresh(self) -> None:
        """Return nothing that can be awaited."""


class NoInterval(Alone):
    """Has a refresh without an interval."""

    async def refresh(self) -> None:
        """Never called without an interval."""


NO_CLASS = Alone()


class Ends(Policy):
    """Records how attempts end."""

    def __init__(self) -> None:
        self.ends: list[tuple[str, bool, int | None]] = []

    def choose(self, request: RouteRequest, candidates: Sequence[Candidate]) -> Choice:
        return candidates[0]

    def on_request_end(
        self,
        request: RouteRequest,
        target: Target,
        ttft_s: float | None,
        seconds: float,
        output_tokens: int | None,
    ) -> None:
        assert seconds >= (ttft_s or 0.0)
        self.ends.append((request.request_id, ttft_s is not None, output_tokens))
