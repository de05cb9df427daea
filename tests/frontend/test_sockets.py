"""The limit of file descriptors, and what it allows."""

from __future__ import annotations

import resource
import subprocess
import sys

from kvrouter.frontend.server.sockets import streams_within
from kvrouter.processes.descriptors import raise_limit

RAISE = """
import resource
hard = min(4096, resource.getrlimit(resource.RLIMIT_NOFILE)[1])
resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
from kvrouter.processes.descriptors import raise_limit
print(raise_limit(), raise_limit(), *resource.getrlimit(resource.RLIMIT_NOFILE), hard)
"""


def test_soft_limit_is_raised() -> None:
    """The soft limit becomes the hard one; a second call changes nothing."""
    output = subprocess.run([sys.executable, "-c", RAISE], capture_output=True, text=True, check=True).stdout
    *limits, hard = map(int, output.split())

    assert [hard] * 4 == limits


def test_returned_limit_holds() -> None:
    """The returned limit is the one that holds."""
    limit = raise_limit()

    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] in {limit, resource.RLIM_INFINITY}


def test_streams() -> None:
    """A stream takes two descriptors, and 200 are reserved for other uses."""
    assert [0, 0, 9_900] == [streams_within(limit) for limit in (0, 100, 20_000)]
