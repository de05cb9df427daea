"""Schemathesis sends what /openapi.json allows, and what it does not, to a real replica. Long."""

from __future__ import annotations

import asyncio
import re
import sys

import pytest

from tests.frontend.fleet import FleetOf
from tests.frontend.workers import OK
from tests.long import needs_long

EXAMPLES = 40
SECONDS = 240
LEAST_CASES = 1000


@needs_long("a minute")
@pytest.mark.timeout(300)
async def test_answers_are_as_described(fleet_of: FleetOf) -> None:
    """No 5xx but those described; statuses, content types and bodies as in the document."""
    async with fleet_of("--router-mode", "kv", scripts=(OK, OK)) as fleet:
        url = fleet.frontend.admin_url
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "schemathesis.cli",
            "run",
            f"{url}/openapi.json",
            f"--max-examples={EXAMPLES}",
            "--checks=not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance,unsupported_method",
            "--phases=examples,coverage,fuzzing",
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.STDOUT,
        )
        output, _ = await asyncio.wait_for(process.communicate(), SECONDS)
        text = output.decode()

        assert 0 == process.returncode, text[-8000:]
        summary = re.search(r"(\d+) generated, \d+ passed.*", text)
        assert summary is not None, text[-2000:]
        print(summary[0])  # noqa: T201
        assert int(summary[1]) > LEAST_CASES
