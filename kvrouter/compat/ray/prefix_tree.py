"""Ray's prefix tree, for routers derived from its PrefixCacheAffinityRouter; mode prefix-affinity needs none.

In Ray it is an actor. Here it is kvrouter's text index in the frontend's process, so a call takes no time:
`get(tree.prefix_match.remote(text, tenants))` returns at once.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from kvrouter.core.tables.text_index import TextIndex
from kvrouter.core.wire.ids import Target, WorkerId

_Value = TypeVar("_Value")


def get(value: _Value) -> _Value:
    """`ray.get`: calls here return their value, not a reference to it."""
    return value


SERVE_CONTROLLER_NAME = "SERVE_CONTROLLER_ACTOR"
SERVE_NAMESPACE = "serve"
SERVE_LOGGER_NAME = "ray.serve"
ActorHandle = Any


class _Called:
    """A method of an actor, which is called as `method.remote(...)`."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self.remote = method


def _by_remote(method: Callable[..., Any]) -> Any:
    return property(lambda self: _Called(functools.partial(method, self)))


class PrefixTreeActor:
    """Which tenant, a replica's id, received which texts."""

    def __init__(self) -> None:
        self._texts = TextIndex()
        self._tenants: set[str] = set()

    @classmethod
    def options(cls, **_options: Any) -> type[PrefixTreeActor]:
        """Ray's name, lifetime and the like: the tree lives as long as the router."""
        return cls

    @classmethod
    def remote(cls) -> PrefixTreeActor:
        """A new tree."""
        return cls()

    @_by_remote
    def insert(self, text: str, tenant: str, time_s: float) -> None:
        """The tenant has received this text."""
        self._tenants.add(tenant)
        self._texts.insert(_target(tenant), text, time_s)

    @_by_remote
    def prefix_match(
        self, text: str, available_tenants: Sequence[str] | None = None
    ) -> tuple[str, list[str] | None]:
        """The longest beginning that any of these tenants has received, and those that have."""
        tenants = sorted(self._tenants if available_tenants is None else available_tenants)
        matched, holders = self._texts.match(text, map(_target, tenants))
        return text[:matched], [one for one in tenants if _target(one) in holders] or None

    @_by_remote
    def get_smallest_tenants(self) -> list[str] | None:
        """Those with the fewest characters."""
        smallest = self._texts.smallest(map(_target, self._tenants))
        return [one for one in sorted(self._tenants) if _target(one) in smallest] or None

    @_by_remote
    def add_tenants(self, tenants: Iterable[str], _time_s: float) -> None:
        """They have received nothing yet."""
        self._tenants.update(tenants)

    @_by_remote
    def remove_tenants(self, tenants: Iterable[str]) -> dict[str, int]:
        """Forget what they received; returns the characters by tenant."""
        known = [one for one in tenants if one in self._tenants]
        self._tenants.difference_update(known)
        return {one: self._texts.remove(_target(one)) for one in known}

    @_by_remote
    def start_eviction_loop(self, _threshold: int, _target: int, _interval_s: float) -> bool:
        """Nothing to start: the index is bounded (docs/policies.md)."""
        return False


class _Controller:
    """Ray's controller, as far as the prefix tree needs it."""

    @_by_remote
    def _register_shutdown_cleanup_actor(self, _actor: object) -> None:
        """Nothing to clean up: the tree ends with its router."""


def get_actor(name: str, namespace: str | None = None) -> Any:
    """`ray.get_actor`: of Serve's actors the controller alone is here. Raises ValueError for another name."""
    if name == SERVE_CONTROLLER_NAME:
        return _Controller()
    raise ValueError(
        f"no actor {name!r} in namespace {namespace!r}: kvrouter has no actors but Serve's controller"
    )


def _target(tenant: str) -> Target:
    return Target(WorkerId(tenant))
