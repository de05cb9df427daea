"""The limit of open files and connections of a process."""

from __future__ import annotations

import resource

# Linux's default for fs.nr_open, the most that setrlimit accepts, even where the hard limit is `unlimited`.
_MOST_DESCRIPTORS = 1_048_576


def raise_limit() -> int:
    """Raise this process's soft limit of descriptors to the hard one; returns the limit that holds now."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = _MOST_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(hard, _MOST_DESCRIPTORS)
    if soft == resource.RLIM_INFINITY or soft >= wanted:
        return soft if soft != resource.RLIM_INFINITY else _MOST_DESCRIPTORS
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
    except (ValueError, OSError):
        return soft  # macOS has another limit below the hard one
    return wanted
