"""Where an engine's events are read: as the flags say, each for itself alone, else as the engine tells."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from kvrouter.worker.options import AgentOptions, read_feeds
from kvrouter.worker.zmq.sockets import FeedOptions

_NO_REPLAY = "no replay: what was cached before kvrouter started stays unknown; "
NO_REPLAY = _NO_REPLAY + 'add "replay_endpoint": "tcp://*:5657" to --kv-events-config'
REPLAY_NOT_GIVEN = (
    _NO_REPLAY + "give replay=tcp://HOST:PORT (an agent: --kv-replay), the replay_endpoint of "
    "the engine's --kv-events-config"
)
OTHER_ENDPOINT = (
    "the engine says its events are at {told}, but kv= (an agent: --kv-events) gives {given}: leave it out, "
    "unless it leads there by another way"
)


def settled_feeds(options: AgentOptions, told: Sequence[FeedOptions], ranks: int) -> Sequence[FeedOptions]:
    """One feed for each of an engine's ranks. Raises ConfigError."""
    feeds = options.feeds
    if not feeds:
        return [replace(feed, topic=options.topic) for feed in told] if options.topic else told
    if len(feeds) == 1 == options.ranks < ranks:
        feeds = read_feeds(feeds[0].events, feeds[0].replay, feeds[0].topic, ranks)
    return [feed if feed.replay else replace(feed, replay=_replay(feed, told)) for feed in feeds]


def feed_lacks(options: AgentOptions, told: Sequence[FeedOptions], ranks: int) -> Iterator[str]:
    """What is missing of the endpoints, and where flags and engine contradict each other."""
    feeds = settled_feeds(options, told, ranks)
    others = [feed.events for feed in feeds if _of_port(feed, told) is None]
    if told and others:
        yield OTHER_ENDPOINT.format(told=", ".join(feed.events for feed in told), given=", ".join(others))
    if not all(feed.replay for feed in feeds):
        is_told = any(feed.replay for feed in told) or not told
        yield REPLAY_NOT_GIVEN if is_told else NO_REPLAY


def _replay(feed: FeedOptions, told: Sequence[FeedOptions]) -> str | None:
    same = _of_port(feed, told)
    return same.replay if same is not None else None


def _of_port(feed: FeedOptions, told: Sequence[FeedOptions]) -> FeedOptions | None:
    """The one that the engine tells; its host may have several names."""
    return next((other for other in told if _port(other.events) == _port(feed.events)), None)


def _port(endpoint: str) -> str:
    return endpoint.rpartition(":")[2]
