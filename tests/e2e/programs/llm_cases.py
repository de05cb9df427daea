"""The `llm` command: streams, a tool that it runs, an object, errors."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from tests.e2e.programs.cases import CITY, MODEL, URL, failures, run

LIMIT_S = 60
TOOL = "def weather(city: str) -> str:\n    return 'rain in ' + city\n"
PAUSE_S = 1
"""The command retries twice and has no option against it: the engine asks for short pauses."""


class CommandError(Exception):
    """The command ended with an exit code other than 0."""


def llm(*arguments: str, model: str = MODEL) -> list[str]:
    """Both outputs of the command, in lines."""
    command = [sys.executable, "-m", "llm", "prompt", "--no-log", "--model", model, *arguments]
    done = subprocess.run(
        command, check=False, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=LIMIT_S
    )
    if done.returncode:
        raise CommandError(done.stderr.strip())
    return [*done.stdout.splitlines(), *done.stderr.splitlines()]


def ask(text: str, model: str = MODEL) -> Any:
    """A case that must fail; a busy engine names its pause."""
    return llm(f"{text} {PAUSE_S}" if text in {"429", "503"} else text, model=model)


def set_up(directory: Path) -> None:
    """Models of the deployment, as the command's documentation says, in its own directory."""
    models = [
        {"model_id": name, "model_name": name, "api_base": f"{URL}/v1"}
        | {"supports_tools": True, "supports_schema": True}
        for name in (MODEL, "absent")
    ]
    (directory / "extra-openai-models.yaml").write_text(json.dumps(models))  # JSON is YAML
    os.environ["LLM_USER_PATH"] = str(directory)


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as user:
        set_up(Path(user))
        run(
            {
                "text": lambda: llm("--usage", "go"),
                "call": lambda: llm("--functions", TOOL, "--td", "go"),
                "object": lambda: llm("--schema", json.dumps(CITY), "go"),
                **failures(ask),
            }
        )
