"""Long answers: JSON lines that are made while they are sent."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator

import pytest
from structlog.testing import capture_logs

from kvrouter.frontend.operators.rights import AdminKey, Rights, open_gate
from kvrouter.frontend.operators.views import answering
from kvrouter.relay.answer import AnswerLines
from kvrouter.relay.begun import Begun
from kvrouter.relay.request import Request, RequestHead

ALL = Rights(open_gate, AdminKey(None))


class SlowClient:
    """Takes one line, then is slow until the test lets it read."""

    is_http_10 = False
    has_begun = False
    address = "127.0.0.1"

    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.waiting: list[Callable[[], None]] = []
        self.begun: Begun | None = None

    def write(self, data: bytes) -> None:
        self.written.append(data)

    @property
    def is_slow(self) -> bool:
        return len(self.written) > 1

    def when_drained(self, call: Callable[[], None]) -> None:
        self.waiting.append(call)

    def lend(self, _begin: object) -> None:
        pass


def request_of(client: SlowClient, method: str = "GET") -> Request:
    return Request(RequestHead(method, "/x", [], wants_keep_alive=True), client, b"")


async def test_no_faster_than_it_is_read() -> None:
    """The next line is made once the client has caught up."""
    made: list[int] = []

    def lines() -> Iterator[bytes]:
        for number in range(3):
            made.append(number)
            yield b"%d\n" % number

    async def view(_: Request) -> AnswerLines:
        return AnswerLines(lines())

    client = SlowClient()
    task = asyncio.ensure_future(answering(view, ALL, open_gate)(request_of(client)))
    for expected in ([0], [0, 1], [0, 1, 2]):
        while not client.waiting:  # noqa: ASYNC110  # nothing but the task runs
            await asyncio.sleep(0)
        assert expected == made
        client.waiting.pop()()
    served = await task

    assert (200, False, False) == (served.status, served.keeps_alive, served.needs_reset)
    assert [b"0\n", b"1\n", b"2\n"] == client.written[1:]


@pytest.mark.parametrize(("method", "parts", "is_reset"), [("HEAD", 1, False), ("GET", 2, True)])
async def test_error_on_the_way(method: str, parts: int, is_reset: bool) -> None:
    """The connection is reset, so that the answer does not look whole; HEAD makes no line."""

    def lines() -> Iterator[bytes]:
        yield b""
        yield b"1\n"
        raise ValueError("broken")

    async def view(_: Request) -> AnswerLines:
        return AnswerLines(lines())

    client = SlowClient()
    client.when_drained = lambda call: call()  # type: ignore[method-assign]
    with capture_logs() as logs:
        served = await answering(view, ALL, open_gate)(request_of(client, method))

    assert (parts, is_reset) == (len(client.written), served.needs_reset)
    assert ["request.failed"] * is_reset == [entry["event"] for entry in logs]
