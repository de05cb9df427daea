"""Programs that use litellm, langchain-openai, instructor or `llm`, with a frontend and two scripted engines.

These packages have a venv of their own, because they need other versions than kvrouter's. Making it takes
minutes: KVROUTER_TEST_LONG=1, or `scripts/test-clients`.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.scripted_engine import engine
from tests.frontend.fleet import Fleet, running_fleet
from tests.frontend.workers import Received, Script, Wire
from tests.long import needs_long

ROOT = Path(__file__).resolve().parents[2]
BUILD_S = 1200
LIMIT_S = 120
"""For one case of a program, and the imports before the first: they take a few seconds."""
QUIET = {
    "HF_HUB_OFFLINE": "1",
    "HTTPS_PROXY": "http://127.0.0.1:9",  # no package needs the internet: what goes there, fails
    "LANGSMITH_TRACING": "false",
    "LITELLM_LOCAL_MODEL_COST_MAP": "True",
    "LITELLM_MODE": "PRODUCTION",  # else it reads the .env of whoever runs the test
    "NO_PROXY": "127.0.0.1",
}
TEXT = '{"city":"Paris"}'
ENGINE, ROUTER = "the engine says no", "The model `absent` does not exist; served: m"
GOT: dict[str, dict[str, Any]] = {
    "litellm_cases": {
        "text": [TEXT, 12],
        "call": ["tool_calls", "weather", TEXT],
        "object": "Paris",
    },
    "langchain_cases": {
        "text": [TEXT, 12],
        "call": ["tool_calls", "weather", {"city": "Paris"}],
        "object": ["Paris", "Paris", "Paris"],
    },
    "instructor_cases": {"text": TEXT, "call": ["Paris", 12], "object": ["Paris", 12], "parts": "Paris"},
    "llm_cases": {
        "text": [TEXT, "Token usage: 9 input, 3 output"],
        "call": [TEXT, "", "Tool call: weather({'city': 'Paris'})", "  rain in Paris", ""],
        "object": [TEXT],
    },
}
FAILURES = ("400", "404", "429", "503", "break")
CLASSES = {
    "litellm_cases": (
        "BadRequestError",
        "NotFoundError",
        "RateLimitError",
        "ServiceUnavailableError",
        "MidStreamFallbackError",
    ),
    "langchain_cases": (
        "OpenAIInvalidRequestError",
        "OpenAIModelNotFoundError",
        "OpenAIRateLimitError",
        "OpenAIAPIError",
        "APIError",
    ),
    "instructor_cases": ("InstructorRetryException",) * 5,
    "llm_cases": ("CommandError",) * 5,
}

pytestmark = [
    needs_long("it installs packages"),
    pytest.mark.timeout(BUILD_S + 9 * LIMIT_S),
]


@pytest.fixture(scope="module")
def python() -> Path:
    """The interpreter that has the packages."""
    directory = Path(os.environ.get("KVROUTER_TEST_CLIENTS") or ROOT / ".clients")
    build = ROOT / "scripts/kit/clients/build"
    done = subprocess.run([build, directory], check=False, capture_output=True, text=True, timeout=BUILD_S)
    assert 0 == done.returncode, f"{build} {directory}:\n{done.stderr[-2000:]}"
    return directory / "venv/bin/python"


def busy_in_turn(*pauses_s: int) -> Script:
    """The engine; its 429 and 503 name these pauses in turn."""
    turns = itertools.cycle(pauses_s)

    async def script(received: Received, wire: Wire) -> None:
        body = received.json
        if body["messages"][-1]["content"] in {"429", "503"}:
            body["messages"][-1]["content"] += f" {next(turns)}"
        await engine(Received(received.head, json.dumps(body).encode()), wire)

    return script


@pytest.fixture
async def fleet(nats_url: str) -> AsyncIterator[Fleet]:
    """A frontend that retries once, and two engines: the first attempt finds 30 s, the second 7 s."""
    script = busy_in_turn(30, 7)
    async with running_fleet(nats_url, "--retries", "1", scripts=(script, script)) as running:
        yield running


def end_of(log: Path) -> str:
    """Its last lines."""
    return log.read_text(errors="replace")[-2000:]


async def results(python: Path, program: str, url: str, complaints: Path) -> dict[str, Any]:
    """What a program printed for each case."""
    command = [str(python), "-m", f"tests.e2e.programs.{program}", url]
    printed: dict[str, Any] = {}
    with complaints.open("wb") as stderr:
        process = await asyncio.create_subprocess_exec(
            *command, env={**os.environ, **QUIET}, cwd=ROOT, stdout=subprocess.PIPE, stderr=stderr
        )
    assert process.stdout is not None
    try:
        while line := await asyncio.wait_for(process.stdout.readline(), LIMIT_S):
            result = json.loads(line)
            printed[result.pop("case")] = result
        assert 0 == await process.wait(), end_of(complaints)
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
    return printed


@pytest.mark.parametrize("program", GOT)
async def test_program(python: Path, fleet: Fleet, tmp_path: Path, program: str) -> None:
    """Streams become texts, calls and objects; each failure raises, with the last attempt's Retry-After."""
    printed = await results(python, program, fleet.url, tmp_path / "stderr")

    failed = {case: printed.pop(case) for case in FAILURES}
    assert GOT[program] == {case: result.get("got", result) for case, result in printed.items()}
    assert CLASSES[program] == tuple(result.get("raised") for result in failed.values())
    for case, result in failed.items():
        assert (ROUTER if case == "404" else ENGINE) in result["text"]
    if program != "llm_cases":  # a command has an exit code and a text only
        statuses = {case: result["status"] for case, result in failed.items() if case != "break"}
        assert {"400": 400, "404": 404, "429": 429, "503": 503} == statuses
        assert ["7", "7"] == [failed[case]["retry_after"] for case in ("429", "503")]
