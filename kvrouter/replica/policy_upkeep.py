"""What policies of one's own need of the event loop: their refreshes run here, and their mistakes are told.

    every 0.1 s:  a policy not seen before   ──> a task of its own: refresh, wait refresh_s, refresh, …
                  one whose pool is gone     ──> close
                  news of what went wrong    ──> the log, once for each kind

A refresh that takes longer than 30 s is ended. `choose` never waits for one.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterator

import structlog

from kvrouter.core.fleet.replica import Replica
from kvrouter.core.routing.policy import Policy
from kvrouter.policies.guarded import Own
from kvrouter.telemetry.metrics import Sample

log = structlog.get_logger()

LOOK_S = 0.1
REFRESH_TIMEOUT_S = 30.0


class PolicyUpkeep:
    """Looks after the own policies of a replica's pools; nothing to do where a mode is used."""

    def __init__(self, replica: Replica) -> None:
        self._replica = replica
        self._refreshes: dict[Own, asyncio.Task[None] | None] = {}
        """Of each policy in use; None where it has nothing to refresh."""
        self._past_troubles: Counter[str] = Counter()

    async def run(self) -> None:
        """Until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            while True:
                self._look(tasks)
                await asyncio.sleep(LOOK_S)

    def _look(self, tasks: asyncio.TaskGroup) -> None:
        """Begin with the policies of new pools, end with those of pools that are gone."""
        policies = list(self._policies())
        for policy in self._refreshes.keys() - set(policies):
            self._end(policy)
        for policy in policies:
            if policy not in self._refreshes:
                name = f"refresh {policy.name}"
                self._refreshes[policy] = (
                    tasks.create_task(_refresh_forever(policy), name=name) if policy.refresh_s > 0 else None
                )
            tell_news(policy)

    def close(self) -> None:
        """The service ends: the policies close what they have opened."""
        for policy in {*self._policies(), *self._refreshes}:
            self._end(policy)

    def _end(self, policy: Own) -> None:
        refresh = self._refreshes.pop(policy, None)
        if refresh is not None:
            refresh.cancel()
        policy.close()
        tell_news(policy)
        self._past_troubles.update(policy.troubles)

    def samples(self) -> Iterator[Sample]:
        """For /metrics."""
        troubles = self._past_troubles.copy()
        for policy in self._policies():
            troubles.update(policy.troubles)
        text = "Mistakes of the own policy, by where; after those of choose the least-loaded worker was taken"
        for where, count in troubles.items():
            yield "kvrouter_policy_troubles", "counter", text, {"where": where}, count

    def _policies(self) -> Iterator[Own]:
        for router in self._replica.routers.values():
            if isinstance(router.selection.policy, Own):
                yield router.selection.policy


async def _refresh_forever(policy: Own) -> None:
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
            policy.failed("refresh", error)  # not we: what it waited for was cancelled
        await asyncio.sleep(policy.refresh_s)


def tell_news(policy: Policy) -> None:
    """Log what has gone wrong for the first time; a built-in mode has no news."""
    for trouble in policy.take_news() if isinstance(policy, Own) else ():
        log.warning(
            "policy.trouble",
            policy=trouble.policy,
            where=trouble.where,
            what=trouble.what,
            traceback=trouble.traceback or None,
            effect="counted in kvrouter_policy_troubles, and not told again",
        )
