"""One question for token ids. A second engine gets it if the first fails or is late.

    0                      late_s                 limit_s
    ├─ first engine ─────────┼──────────────────────┤
    │     ├─ fails ──> second engine                │   the first answer counts
    │     │                  └─ late ──> second ────┤
    │     └─ rejects the prompt ──> the end: another engine would reject it as well

There is no third engine, and both have `limit_s` together: a fleet that hangs costs a request no more than an
engine that hangs.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TypeAlias

from kvrouter.tokens.prompt import TokenIds
from kvrouter.tokens.remote_tokenizer import (
    EngineTokenizer,
    EngineTokenizerError,
    PromptRejectedError,
    SlowError,
)

# A second engine with less time than this would hardly answer.
LEAST_S = 0.02


@dataclass(slots=True)
class Question:
    """What came of a question."""

    found: list[TokenIds] | None = None
    """The ids of each body; None if no engine has answered."""
    answered: str = ""
    """The URL of the engine that has."""
    errors: dict[str, EngineTokenizerError] = field(default_factory=dict)
    """By URL, in the order in which they came."""


_Calls: TypeAlias = dict[asyncio.Task[list[TokenIds] | EngineTokenizerError], str]


async def ask_in_turn(
    engines: EngineTokenizer,
    urls: Sequence[str],
    bodies: list[bytes],
    *,
    route: str,
    late_s: float,
    limit_s: float,
) -> Question:
    """Ask the engine at the first URL, and that at the second if it fails, or is silent for `late_s`."""
    now = asyncio.get_running_loop().time
    began, asked, calls = now(), Question(), _Calls()
    async with asyncio.TaskGroup() as tasks:
        for url in urls[:2]:
            left_s = began + limit_s - now()
            if left_s < LEAST_S:
                break
            calls[tasks.create_task(_answer(engines, url, route, bodies, left_s))] = url
            # The last call ends by its own limit.
            if await _is_settled(calls, asked, None if url == urls[:2][-1] else began + late_s):
                break
        for late, url in calls.items():
            late.cancel()
            if asked.found is not None and not late.done():
                asked.errors[url] = SlowError(f"{url}/{route}: no answer within {now() - began:.2g} s")
    return asked


async def _is_settled(calls: _Calls, asked: Question, until: float | None) -> bool:
    """Wait for an answer or a rejection. False: every call has failed, or `until` has passed."""
    now = asyncio.get_running_loop().time
    while calls:
        wait_s = None if until is None else until - now()
        done, _ = await asyncio.wait(calls, timeout=wait_s, return_when=asyncio.FIRST_COMPLETED)
        if not done:
            return False
        for call in done:
            url, result = calls.pop(call), call.result()
            if isinstance(result, list):
                asked.found, asked.answered = result, url
                return True
            asked.errors[url] = result
            if isinstance(result, PromptRejectedError):
                return True
    return False


async def _answer(
    engines: EngineTokenizer, url: str, route: str, bodies: list[bytes], limit_s: float
) -> list[TokenIds] | EngineTokenizerError:
    try:
        return await engines.answers(url, bodies, limit_s, route)
    except EngineTokenizerError as error:
        return error
