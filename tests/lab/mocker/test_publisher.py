"""The event sockets, over real ZMQ."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import msgpack
import pytest
import zmq
import zmq.asyncio

from kvrouter.lab.mocker.events import END_OF_REPLAY, GPU, BatchEncoder, removed, sequence_frame
from kvrouter.lab.mocker.publisher import Publisher, rank_endpoint

ANY_PORT = "tcp://127.0.0.1:0"
TOPIC = "kv@pod1@tiny"
END = [b"", b"", END_OF_REPLAY, b""]


@pytest.fixture
async def publisher() -> AsyncIterator[Publisher]:
    """A publisher with replay."""
    async with Publisher.open(ANY_PORT, ANY_PORT, BatchEncoder("map", 0), TOPIC) as publisher:
        yield publisher


@pytest.fixture
def context() -> Iterator[zmq.asyncio.Context]:
    """A ZMQ context for the reader's side."""
    with zmq.asyncio.Context() as context:
        yield context


@pytest.fixture
def dealer(context: zmq.asyncio.Context, publisher: Publisher) -> Iterator[zmq.asyncio.Socket]:
    """A reader that requests replays."""
    with context.socket(zmq.DEALER) as dealer:
        assert publisher.replay_endpoint is not None
        dealer.linger = 0
        dealer.connect(publisher.replay_endpoint)
        yield dealer


def publish(publisher: Publisher, count: int) -> None:
    """Send `count` batches, the n-th at time n."""
    for number in range(count):
        publisher.publish(float(number), [removed(number, GPU)])


async def replay(dealer: zmq.asyncio.Socket, start: bytes) -> list[list[bytes]]:
    """Everything up to the end marker."""
    await dealer.send_multipart([b"", start])
    messages = [await dealer.recv_multipart()]
    while messages[-1] != END:
        messages.append(await dealer.recv_multipart())
    return messages


async def test_subscriber_sees_topic_number_and_payload(
    context: zmq.asyncio.Context, publisher: Publisher, dealer: zmq.asyncio.Socket
) -> None:
    """Sequence numbers count batches, so the n-th batch has number n."""
    with context.socket(zmq.SUB) as subscriber:
        subscriber.connect(publisher.endpoint)
        subscriber.subscribe(TOPIC)
        while not await subscriber.poll(10):  # until the subscription has arrived
            publish(publisher, 1)

        topic, seq, payload = await subscriber.recv_multipart()

    assert TOPIC.encode() == topic
    assert [seq, payload] == (await replay(dealer, seq))[0][-2:]
    assert [0.0, 0] == msgpack.unpackb(payload)[::2]


async def test_replay_from_a_number_on(dealer: zmq.asyncio.Socket, publisher: Publisher) -> None:
    """All buffered batches from the start number on, then the end marker."""
    publish(publisher, 5)

    messages = await replay(dealer, sequence_frame(3))

    assert [[b"", TOPIC.encode(), sequence_frame(n)] for n in (3, 4)] == [m[:3] for m in messages[:-1]]


@pytest.mark.parametrize("start", [sequence_frame(5), END_OF_REPLAY])
async def test_replay_of_the_future(dealer: zmq.asyncio.Socket, publisher: Publisher, start: bytes) -> None:
    """A start beyond the newest (-1 is read unsigned) gets the end marker alone."""
    publish(publisher, 5)

    assert [END] == await replay(dealer, start)


async def test_long_replay_is_complete(dealer: zmq.asyncio.Socket, publisher: Publisher) -> None:
    """The whole buffer, and nothing older, far beyond ZMQ's own queue limits."""
    publish(publisher, 10_100)

    messages = await replay(dealer, sequence_frame(0))

    assert [sequence_frame(n) for n in range(100, 10_100)] == [m[2] for m in messages[:-1]]


async def test_request_without_delimiter(dealer: zmq.asyncio.Socket, publisher: Publisher) -> None:
    """It gets no answer; the next valid one does."""
    publish(publisher, 1)
    await dealer.send_multipart([sequence_frame(0)])

    assert 2 == len(await replay(dealer, sequence_frame(0)))


async def test_no_replay() -> None:
    """An engine may have no replay socket."""
    async with Publisher.open(ANY_PORT, None, BatchEncoder("map", 0), "") as publisher:
        publish(publisher, 1)

        assert publisher.replay_endpoint is None


async def test_taken_port(publisher: Publisher) -> None:
    """An endpoint in use fails at once, and leaves nothing open."""
    opening = Publisher.open(ANY_PORT, publisher.endpoint, BatchEncoder("map", 0), "")

    with pytest.raises(zmq.ZMQError, match="in use"):
        await opening.__aenter__()


def test_ranks_have_separate_ports() -> None:
    """The port is offset by the rank, but 0 stays 0."""
    assert "tcp://*:5559" == rank_endpoint("tcp://*:5557", 2)
    assert ANY_PORT == rank_endpoint(ANY_PORT, 2)
    assert "ipc:///tmp/kv" == rank_endpoint("ipc:///tmp/kv", 0)
