"""How many streams the operating system lets a replica hold: each takes two file descriptors."""

from __future__ import annotations

import resource

_MOST = 1_048_576
"""What Linux allows at most unless it is told otherwise; a hard limit may also be `unlimited`."""
_OWN = 200
"""For the listener, NATS, logs, files, idle connections and clients that ask for /metrics."""
_PER_STREAM = 2
"""The client's connection and the worker's."""


def raise_limit() -> int:
    """Raise this process's soft limit as far as the hard one lets it; returns what it is now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST if hard == resource.RLIM_INFINITY else min(hard, _MOST)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else _MOST
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft  # macOS has a limit of its own below the hard one
    return wanted


def streams_within(limit: int) -> int:
    """How many can be open at once with so many descriptors."""
    return max(0, limit - _OWN) // _PER_STREAM
