"""Runs the refreshes of custom policies and logs their mistakes.

    every 0.1 s:  a new policy                      ──> a task: refresh, wait refresh_s, refresh, …
                  a policy whose pool is gone       ──> close
                  a mistake of a kind not seen yet  ──> the log

A refresh that takes longer than 30 s is cancelled. `choose` never waits for a refresh.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import structlog

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.policies.guarded import GuardedPolicy
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

LOOK_S = 0.1
REFRESH_TIMEOUT_S = 30.0


class PolicyUpkeep:
    """Looks after the custom policies of a replica's pools. A built-in mode needs no upkeep."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._refreshes: dict[
            GuardedPolicy, asyncio.Task[None] | None
        ] = {}  # None: the policy has no refresh
        self._past_troubles: Counter[str] = Counter()

    async def run(self) -> None:
        """Look after the policies until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._look(tasks)
                await asyncio.sleep(LOOK_S)

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Start refreshing the policies of new pools; close those whose pools are gone."""
        policies = list(self._policies())
        for policy in self._refreshes.keys() - set(policies):
            self._end(policy)
        for policy in policies:
            if policy not in self._refreshes:
                name = f"refresh {policy.name}"
                self._refreshes[policy] = (
                    tasks.create_task(_refresh_forever(policy), name=name) if policy.refresh_s > 0 else None
                )
            log_mistakes(policy)

    def close(self) -> None:
        """Close all policies at the end of the service."""
        for policy in {*self._policies(), *self._refreshes}:
            self._end(policy)

    def _end(self, policy: GuardedPolicy) -> None:
        refresh = self._refreshes.pop(policy, None)
        if refresh is not None:
            refresh.cancel()
        policy.close()
        log_mistakes(policy)
        self._past_troubles.update(policy.troubles)

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        troubles = self._past_troubles.copy()
        for policy in self._policies():
            troubles.update(policy.troubles)
        for where, count in troubles.items():
            yield "kvrouter_policy_troubles_total", {"where": where}, count

    def _policies(self) -> Iterator[GuardedPolicy]:
        for router in self._replica.routers.values():
            if isinstance(router.selection.policy, GuardedPolicy):
                yield router.selection.policy


async def _refresh_forever(policy: GuardedPolicy) -> None:
    while True:
        try:
            async with asyncio.timeout(REFRESH_TIMEOUT_S):
                await policy.refresh()
        except TimeoutError:
            policy.note("refresh", f"has taken longer than {REFRESH_TIMEOUT_S:g} s")
        except asyncio.CancelledError as error:
            task = asyncio.current_task()
            if task is None or task.cancelling():
                raise
            # Not this task was cancelled, but a future that the refresh awaited: a mistake like any other.
            policy.failed("refresh", error)
        await asyncio.sleep(policy.refresh_s)


def log_mistakes(policy: BuiltInPolicy) -> None:
    """Log the mistakes of a custom policy that are new; a built-in mode makes none."""
    for trouble in policy.take_news() if isinstance(policy, GuardedPolicy) else ():
        log.warning(
            "policy.trouble",
            policy=trouble.policy,
            where=trouble.where,
            what=trouble.what,
            traceback=trouble.traceback or None,
            effect="counted in kvrouter_policy_troubles; not logged again",
        )
