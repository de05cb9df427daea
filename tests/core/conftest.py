"""A time limit for native calls that do not end."""

from __future__ import annotations

import faulthandler
import os
from collections.abc import Iterator

import pytest

ENDLESS_S = 600.0


@pytest.fixture(autouse=True, scope="module")
def _endless_call_is_shown(request: pytest.FixtureRequest) -> Iterator[None]:
    """An endless native call holds the GIL, so no other timeout runs; this one ends pytest."""
    with request.config.pluginmanager.getplugin("capturemanager").global_and_fixture_disabled():
        stderr = os.dup(2)
    faulthandler.dump_traceback_later(ENDLESS_S, exit=True, file=stderr)
    yield
    faulthandler.cancel_dump_traceback_later()
    os.close(stderr)
