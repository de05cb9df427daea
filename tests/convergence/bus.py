"""Virtual time, processes that can be stopped, and a NATS that loses, repeats, delays and splits.

    Process ── Line ──publish──> Net ──(loss, delay, repeat)──> Line ── callback, when not paused

Order is kept from one sender to one subscription, as NATS keeps it; a repeated copy may come late.
Chance is drawn from one seeded generator, in the order of events: a history repeats exactly.
"""

from __future__ import annotations

import heapq
import random
from collections.abc import Callable
from dataclasses import dataclass

from xxhash import xxh3_64

Action = Callable[[], None]
OnMessage = Callable[[str, bytes, str], None]


class Agenda:
    """Future events, in order of time."""

    def __init__(self) -> None:
        self.now = 1000.0
        self._heap: list[tuple[float, int, Action]] = []
        self._count = 0

    def at(self, when: float, action: Action) -> None:
        """Schedule an event; of events at one time the first scheduled comes first."""
        self._count += 1
        heapq.heappush(self._heap, (when, self._count, action))

    def run(self, seconds: float) -> None:
        """Let time pass."""
        end = self.now + seconds
        while self._heap and self._heap[0][0] <= end:
            self.now, _, action = heapq.heappop(self._heap)
            action()
        self.now = end


class Process:
    """A process with its own clock that can be stopped (SIGSTOP) and killed (SIGKILL)."""

    def __init__(self, agenda: Agenda, skew_s: float) -> None:
        self.is_alive = True
        self.is_paused = False
        self._agenda = agenda
        self._skew_s = skew_s
        self._queued: list[Action] = []

    def now(self) -> float:
        """Its own clock, which is compared with no other."""
        return self._agenda.now + self._skew_s

    def after(self, seconds: float, action: Action) -> None:
        """Set a timer."""
        self._agenda.at(self._agenda.now + seconds, lambda: self.run(action))

    def run(self, action: Action) -> None:
        """Run it now. A paused process runs it when it resumes, a dead one never."""
        if self.is_paused:
            self._queued.append(action)
        elif self.is_alive:
            action()

    def pause(self) -> None:
        """Stop until `resume`."""
        self.is_paused = True

    def resume(self) -> None:
        """Run what has arrived and become due in the meantime."""
        self.is_paused = False
        queued, self._queued = self._queued, []
        for action in queued:
            self.run(action)

    def kill(self) -> None:
        """End without publishing anything."""
        self.is_alive = False
        self._queued.clear()


@dataclass(frozen=True, slots=True)
class Weather:
    """The probability that a message is lost, repeated, or delayed (up to a second)."""

    loss: float = 0.0
    repeat: float = 0.0
    slow: float = 0.0


FINE = Weather()


@dataclass(frozen=True, slots=True)
class _Message:
    subject: str
    payload: bytes
    reply: str


class Net:
    """The NATS server."""

    def __init__(self, agenda: Agenda, rng: random.Random, max_payload: int) -> None:
        self.weather = FINE
        self.max_payload = max_payload
        self.trace = xxh3_64()
        """Hash of all messages and their times: two runs of one history have the same."""
        self.agenda = agenda
        self._rng = rng
        self._exact: dict[str, list[tuple[Line, OnMessage]]] = {}
        self._below: list[tuple[str, Line, OnMessage]] = []
        self._order: dict[tuple[int, int, str], float] = {}
        self._stopped_until = 0.0

    def subscribe(self, line: Line, subject: str, callback: OnMessage) -> None:
        """Subscribe; the subscription outlives reconnections."""
        if subject.endswith(">"):
            self._below.append((subject[:-1], line, callback))
        else:
            self._exact.setdefault(subject, []).append((line, callback))

    def unsubscribe(self, line: Line, subject: str) -> None:
        """End a subscription."""
        kept = [entry for entry in self._exact.pop(subject, []) if entry[0] is not line]
        if kept:
            self._exact[subject] = kept

    def has_subscriber(self, subject: str) -> bool:
        """Whether a connected subscriber exists."""
        return any(line.is_open for line, _ in self._exact.get(subject, ()))

    def stop(self, seconds: float) -> None:
        """SIGSTOP: no message is delivered until then; then one sender's messages may arrive in a burst."""
        self._stopped_until = self.agenda.now + seconds

    def publish(self, sender: Line, subject: str, payload: bytes, reply: str = "") -> None:
        """Deliver to all subscribers, with a delay and loss for each."""
        message = _Message(subject, payload, reply)
        for line, callback in self._exact.get(subject, ()):
            self._carry(sender, line, subject, message, callback)
        for root, line, callback in self._below:
            if subject.startswith(root):
                self._carry(sender, line, root, message, callback)

    def _carry(
        self, sender: Line, to: Line, subscription: str, message: _Message, callback: OnMessage
    ) -> None:
        rng, weather = self._rng, self.weather
        is_lost = rng.random() < weather.loss
        if is_lost or sender.is_mute or sender.side != to.side or not to.is_open:
            return
        delay = rng.uniform(0.0002, 0.002)
        if rng.random() < weather.slow:
            delay += rng.random()
        way = (sender.number, to.number, subscription)
        start = max(self.agenda.now, self._stopped_until)
        when = self._order[way] = max(start + delay, self._order.get(way, 0.0))
        epoch = to.epoch
        self.agenda.at(when, lambda: self._arrive(to, epoch, message, callback))
        if rng.random() < weather.repeat:
            late = when + 2.0 * rng.random()
            self.agenda.at(late, lambda: self._arrive(to, epoch, message, callback))

    def _arrive(self, to: Line, epoch: int, message: _Message, callback: OnMessage) -> None:
        if to.is_deaf or to.epoch != epoch or not to.process.is_alive:
            return
        self.trace.update(f"{self.agenda.now} {to.number} {message.subject}".encode())
        self.trace.update(message.payload)
        to.process.run(lambda: callback(message.subject, message.payload, message.reply))


class Line:
    """One process's connection. `is_mute`: its messages are lost; `is_deaf`: messages to it are."""

    local_host = ""

    def __init__(self, net: Net, process: Process, number: int) -> None:
        self.process = process
        self.number = number
        self.side = 0
        self.is_mute = False
        self.is_deaf = False
        self.is_connected = False
        self.epoch = 0
        self._net = net
        self._connect_callbacks: list[Action] = []
        self._awaited: set[str] = set()
        self.requests = 0

    @property
    def is_open(self) -> bool:
        """Whether the server would deliver to it."""
        return self.is_connected and self.process.is_alive

    @property
    def max_payload(self) -> int:
        """The server's limit for one message."""
        return self._net.max_payload

    def connect(self) -> None:
        """The process is connected (again)."""
        if not self.is_connected and self.process.is_alive:
            self.is_connected = True
            for callback in self._connect_callbacks:
                self.process.run(callback)

    def disconnect(self) -> None:
        """The connection breaks; messages on their way to it are lost."""
        self.is_connected = False
        self.epoch += 1

    def mend(self) -> None:
        """End all faults."""
        self.is_mute = self.is_deaf = False
        self.side = 0
        self.connect()

    # The interface of Bus

    def publish(self, subject: str, payload: bytes) -> bool:
        """Publish, in order; False without a connection."""
        if self.is_connected:
            self._net.publish(self, subject, payload)
        return self.is_connected

    async def subscribe(self, subject: str, on_message: OnMessage) -> None:
        """Subscribe, for callers that await it."""
        self.listen(subject, on_message)

    def listen(self, subject: str, on_message: OnMessage) -> None:
        """Call `on_message` for each message, also after reconnects."""
        self._net.subscribe(self, subject, on_message)

    def on_connect(self, callback: Action) -> None:
        """Call `callback` after every (re)connection."""
        self._connect_callbacks.append(callback)

    def request(
        self,
        subject: str,
        payload: bytes,
        timeout_s: float,
        answered: Callable[[bytes], None],
        failed: Action,
    ) -> None:
        """Send a request; calls exactly one of the two, `answered` with the first reply."""
        self.requests += 1
        inbox = f"_INBOX.{self.number}.{self.requests}"
        if not self.is_connected or not self._net.has_subscriber(subject):
            self.process.after(0.0, failed)  # NATS reports a missing responder at once
            return

        def reply_came(_subject: str, data: bytes, _reply: str) -> None:
            if self._end_request(inbox):
                answered(data)

        def time_is_up() -> None:
            if self._end_request(inbox):
                failed()

        self._awaited.add(inbox)
        self._net.subscribe(self, inbox, reply_came)
        self._net.publish(self, subject, payload, inbox)
        self.process.after(timeout_s, time_is_up)

    def _end_request(self, inbox: str) -> bool:
        was_awaited = inbox in self._awaited
        self._awaited.discard(inbox)
        self._net.unsubscribe(self, inbox)
        return was_awaited
