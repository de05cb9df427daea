"""What a read of NATS's socket has brought: runs of messages of one subscription, all reported in one call.

    rest + read ──messages of a plain subscription──> NatsClient.deliver
         │ └──a message that is not complete──> rest
         └──anything else, a payload above MOST_BYTES──> nats-py, which takes 3 to 10 µs for each message

What NATS sends: `MSG subject sid [reply] size`, a line end, the payload, a line end.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from nats.protocol.parser import AWAITING_MSG_PAYLOAD, MAX_CONTROL_LINE_SIZE, Parser

from kvrouter.core.native import versions
from kvrouter.core.wire.senders import Message

_BEGIN, _LINE_END = b"MSG ", b"\r\n"


class MessageRun(NamedTuple):
    """Whole messages of one subscription."""

    sid: int
    messages: list[Message]
    end: int
    """Where they end in the read."""
    cut_bytes: int
    """The payload of the message behind them, if it is not complete; else -1."""


def run_at(data: bytes, at: int) -> MessageRun:
    """The run that begins there; it has no messages if something else does. Python is the specification."""
    sid, messages, cut_bytes = -1, [], -1
    while data.startswith(_BEGIN, at):
        line_end = data.find(_LINE_END, at, at + MAX_CONTROL_LINE_SIZE)
        words = data[at + len(_BEGIN) : line_end].split(b" ")
        is_plain = line_end >= 0 and len(words) in {3, 4} and all(words)
        if not (is_plain and _is_number(words[1]) and _is_number(words[-1])):
            break
        if sid not in {-1, int(words[1])}:
            break
        sid, begin, size = int(words[1]), line_end + len(_LINE_END), int(words[-1])
        if begin + size + len(_LINE_END) > len(data):
            cut_bytes = size
            break
        reply = words[2] if len(words) > 3 else b""
        messages.append((text_of(words[0]), data[begin : begin + size], text_of(reply)))
        at = begin + size + len(_LINE_END)
    return MessageRun(sid, messages, at, cut_bytes)


def text_of(subject: bytes) -> str:
    """A subject, which may have any bytes."""
    return subject.decode(errors="replace")


def _is_number(word: bytes) -> bool:
    return word.isdigit() and len(word) <= 18  # in C it has 64 bits


class Reports(Protocol):
    """The client behind a parser."""

    def plain(self, sid: int) -> object | None:
        """None if nats-py reports the messages of this subscription."""
        ...

    async def deliver(self, sid: int, messages: list[Message]) -> None:
        """Report these."""
        ...


class PlainMessages(Parser):
    """nats-py's parser, which is spared the messages of plain subscriptions."""

    MOST_BYTES = 1024 * 1024
    """Of a payload that arrives in parts: each part is copied with those before it."""

    def __init__(self, client: Reports) -> None:
        super().__init__(client)
        self._client = client

    def reset(self) -> None:
        super().reset()
        self._rest = b""

    async def parse(self, data: bytes = b"") -> None:
        if self.state == AWAITING_MSG_PAYLOAD:  # nats-py is amid a message: its payload is no protocol
            most = self.needed + len(_LINE_END) - len(self.buf)
            await super().parse(data[:most])
            data = data[most:]
            if self.state == AWAITING_MSG_PAYLOAD or not data:
                return
        if self._rest or self.buf:
            data, self._rest = b"".join((self._rest, self.buf, data)), b""
            self.buf.clear()
        native = versions.chosen.messages
        at, runs = 0, run_at if native is None else native.run_at
        while True:
            sid, messages, end, cut_bytes = runs(data, at)
            if sid < 0 or self._client.plain(sid) is None:
                break
            if messages:
                await self._client.deliver(sid, messages)
                at = end
            if 0 <= cut_bytes <= self.MOST_BYTES:
                self._rest = data[at:]
                return
            if cut_bytes >= 0:
                break
        if at < len(data):
            await super().parse(data[at:] if at else data)
