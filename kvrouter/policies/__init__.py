"""Policies pick one of the candidates they are shown. They own no tables, tasks or caches."""

from __future__ import annotations

from kvrouter.core.policy import Policy
from kvrouter.policies.kv import Kv
from kvrouter.policies.plain import Random, RoundRobin

POLICIES: dict[str, type[Policy]] = {"kv": Kv, "round-robin": RoundRobin, "random": Random}
"""By `--router-mode`."""
