"""Both versions of the hot tables and hashes: what is tested in Python is tested in C."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from kvrouter.core import twins


@pytest.fixture(params=twins.CORES, scope="module")
def core(request: pytest.FixtureRequest) -> Iterator[str]:
    """The version in use while a module's tests run; `pytestmark = usefixtures("core")` runs them on each."""
    before = twins.in_use()
    if request.param == twins.NATIVE and twins.why_not_built:
        pytest.skip(f"not built here: {twins.why_not_built}")
    yield twins.choose(request.param)
    twins.choose(before)
