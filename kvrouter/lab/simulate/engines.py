"""What a simulated engine is to a fleet, and the mocker's engine as one."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from kvrouter.lab.mocker.engine import Engine, EngineConfig, EngineRequest, StepResult
from kvrouter.lab.mocker.events import BlockRemoved, BlockStored


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request. `hashes` are the sequence hashes of the prompt's full blocks.

    `leaves_after_s`: the client leaves then, if the answer is not complete. `after`: the numbers of requests
    that must have ended; `at` are then the seconds since the last of these ends.
    """

    at: float
    hashes: Sequence[int]
    prompt_tokens: int
    output_tokens: int
    text: str = ""
    leaves_after_s: float = math.inf
    after: tuple[int, ...] = ()
    session: str = ""


class Listener(Protocol):
    """Receives what happens in an engine, at the moment it happens."""

    def began(self, number: int, cached_tokens: int, now: float) -> None:
        """The first token of a request."""

    def ended(self, number: int, now: float) -> None:
        """The last token of a request."""

    def stored(self, hashes: Sequence[int]) -> None:
        """Blocks became reusable, parents first."""

    def removed(self, hashes: Sequence[int]) -> None:
        """Blocks were evicted."""


class SimulatedEngine(Protocol):
    """An engine in virtual time; it calls its Listener."""

    due: float
    """When `advance` must be called; infinite: it is idle. `add` and `abort` may change it."""

    @property
    def num_running(self) -> int: ...
    @property
    def num_waiting(self) -> int: ...
    @property
    def kv_usage(self) -> float: ...

    def add(self, number: int, arrival: Arrival, now: float) -> None:
        """Queue a request."""

    def abort(self, number: int, now: float) -> None:
        """End a request without its listener being called."""

    def advance(self, now: float) -> None:
        """What is due happens."""


class MockerEngine:
    """The mocker's engine, step by step."""

    def __init__(self, config: EngineConfig, listener: Listener) -> None:
        self.engine = Engine(config)
        self.due = math.inf
        self._listener = listener
        self._result: StepResult | None = None
        self._begun: set[str] = set()

    @property
    def num_running(self) -> int:
        return self.engine.num_running

    @property
    def num_waiting(self) -> int:
        return self.engine.num_waiting

    @property
    def kv_usage(self) -> float:
        return self.engine.kv_usage

    def add(self, number: int, arrival: Arrival, now: float) -> None:
        request = EngineRequest(
            str(number),
            # zeros: the engine names blocks by `hashes`, not by tokens
            array("I", bytes(4 * arrival.prompt_tokens)),
            max_tokens=arrival.output_tokens,
            hashes=tuple(arrival.hashes),
        )
        self.engine.add(request)
        if self._result is None:
            self._step(now)

    def abort(self, number: int, _now: float) -> None:
        self.engine.abort(str(number))
        self._begun.discard(str(number))

    def advance(self, now: float) -> None:
        result, listener = self._result, self._listener
        assert result is not None
        for event in result.events:
            if isinstance(event, BlockStored):
                listener.stored(event.block_hashes)
            elif isinstance(event, BlockRemoved):
                listener.removed(event.block_hashes)
        for output in result.outputs:
            if output.id not in self._begun:
                self._begun.add(output.id)
                listener.began(int(output.id), output.cached_tokens, now)
            if output.finish_reason:
                self._begun.discard(output.id)
                listener.ended(int(output.id), now)
        self._step(now)

    def _step(self, now: float) -> None:
        self._result = self.engine.step() if self.engine.has_work() else None
        self.due = now + self._result.duration_s if self._result is not None else math.inf
