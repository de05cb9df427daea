"""One rank's events that its engine returns over HTTP: TensorRT-LLM's, which are asked for again and again.

An answer takes its events from the engine, so nothing can be read twice: an answer that is lost makes a gap,
and a gap is lost history. Each event is a batch, whose number is the event's.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import structlog

from kvrouter.long_wait import LongWait
from kvrouter.worker.engines.http import EngineError, EngineHttp, remedy_of
from kvrouter.worker.engines.tensorrt import EVENTS_PATH, read_answer
from kvrouter.worker.zmq.ordering import Action, EngineStream, Step

log = structlog.get_logger()

# Between two questions. The engine itself waits for events for a while before it answers.
POLL_S = 0.05
# After a question without an answer. The agent's probes notice an engine that is down.
PAUSE_S = 1.0
# Events that are applied before other tasks get a turn.
_TURN_EVENTS = 256


class PolledEvents:
    """The events of an engine behind `engine`. `run` it in a task. See RankEvents."""

    notes: tuple[str, ...] = ()

    def __init__(self, engine: EngineHttp) -> None:
        self.stream = EngineStream(can_replay=False)
        self.settled = asyncio.Event()
        self._engine = engine
        self._is_new = True
        # For an answer; None: the last question had one.
        self._wait: LongWait | None = None

    def learn_replay(self, endpoint: str | None) -> None:
        """There is no replay."""

    def resume(self, seq: int, digest: bytes, *, was_complete: bool) -> None:
        """Nothing proves that the engine is still the same, so the table begins empty."""

    def restart(self) -> None:
        """Begin with an empty table."""
        self._is_new = True

    async def run(self, on_action: Callable[[Action], None]) -> None:
        """Call `on_action` for every action, in order, until cancelled."""
        while True:
            await self._ask(on_action)
            await asyncio.sleep(POLL_S if self._wait is None else PAUSE_S)

    async def _ask(self, on_action: Callable[[Action], None]) -> None:
        try:
            events = read_answer(await self._engine.take(EVENTS_PATH))
        except EngineError as error:
            now = asyncio.get_running_loop().time()
            if self._wait is None:
                log.warning("engine.no_events", path=EVENTS_PATH, reason=str(error))
                self._wait = LongWait("events.awaited", "KV events", now, path=EVENTS_PATH)
            self._wait.look(now, str(error), remedy_of(error))
            return
        self._wait = None
        if self._is_new:
            self._is_new = False
            _perform(self.stream.begin(), on_action)
        for count, (number, event) in enumerate(events):
            if number == 0 and self.stream.next_seq:
                _perform(
                    self.stream.begin(), on_action
                )  # another process: its first event is always the same
            _perform(self.stream.receive(number, event), on_action)
            if count % _TURN_EVENTS == _TURN_EVENTS - 1:
                await asyncio.sleep(0)
        self.settled.set()


def _perform(step: Step, on_action: Callable[[Action], None]) -> None:
    for action in step.actions:
        on_action(action)
