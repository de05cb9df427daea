"""The selections of one router: that of its own mode, and those of other modes that requests ask for.

    own ──┬── policy, and turns of its own
    p2c ──┤   built when first asked for, once
    …   ──┘
          tables (rates, texts, cold, sessions) and filters: the same for all

Bounded: `new_policy` refuses names that are no mode.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from kvrouter.core.routing.policy import Policy
from kvrouter.core.routing.selection import Selection
from kvrouter.errors import BadRequestError


class Modes:
    """Selections by the name of their mode."""

    def __init__(
        self, own: Selection, own_name: str = "", new_policy: Callable[[str], Policy] | None = None
    ) -> None:
        self.own = own
        self.own_name = own_name
        self._new_policy = new_policy
        self._others: dict[str, Selection] = {}

    def of(self, name: str) -> Selection:
        """The selection of a mode; no name is the router's own. Raises BadRequestError for no mode."""
        if not name or name == self.own_name:
            return self.own
        selection = self._others.get(name)
        if selection is None:
            selection = self._others[name] = self._begin(name)
        selection.filters = self.own.filters  # which may have changed since
        return selection

    def _begin(self, name: str) -> Selection:
        if self._new_policy is None:
            raise BadRequestError(f"this router has one mode only; {name!r} is not it", param="mode")
        return Selection(self._new_policy(name), replace(self.own.state))
