"""The public names, and what importing them loads."""

from __future__ import annotations

import subprocess
import sys
from importlib import resources

import pytest

import kvrouter


def modules_after(statement: str) -> set[str]:
    """Modules that a fresh interpreter has loaded after this code."""
    program = f"import sys\n{statement}\nprint(*sys.modules)"
    said = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    return set(said.stdout.split())


def test_import_is_cheap() -> None:
    """`import kvrouter` loads only its version."""
    loaded = modules_after("import kvrouter")

    ours = {name for name in loaded if name.startswith("kvrouter")}
    assert {"kvrouter", "kvrouter.version"} == ours
    assert loaded.isdisjoint({"nats", "aiohttp", "msgspec", "structlog", "asyncio", "xxhash", "zmq"})


def test_names_bring_only_what_they_need() -> None:
    """A policy's types need no network; hashes need no more than xxhash."""
    assert modules_after("from kvrouter import Policy, Candidate").isdisjoint({"nats", "aiohttp", "zmq"})
    assert modules_after("from kvrouter import block_hashes").isdisjoint({"nats", "aiohttp", "structlog"})


def test_all_names_are_there() -> None:
    """Each name can be imported and is in `__all__`."""
    for name in kvrouter.__all__:
        assert getattr(kvrouter, name) is not None
    assert set(kvrouter.__all__) == {*kvrouter._ON_DEMAND, "__version__"}
    with pytest.raises(AttributeError, match="no attribute 'KvIndex'"):
        kvrouter.KvIndex  # noqa: B018  # asking is the test


def test_typed() -> None:
    """The package has `py.typed`."""
    assert resources.files("kvrouter").joinpath("py.typed").is_file()
