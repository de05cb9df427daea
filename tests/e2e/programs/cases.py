"""What each program asks of the deployment, and how it prints what it got: a line of JSON for each case."""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Callable
from typing import Any

URL = sys.argv[1]
MODEL = "m"
CITY: dict[str, Any] = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": CITY}}
STATUSES = ("400", "429", "503")
"""The scripted engine answers such a message with this status."""


def says(text: str) -> list[dict[str, str]]:
    """The messages of one turn."""
    return [{"role": "user", "content": text}]


def failures(ask: Callable[..., Any]) -> dict[str, Callable[[], Any]]:
    """The cases that must raise. `ask(text, model=…)` streams an answer to its end."""
    return {
        **{status: functools.partial(ask, status) for status in STATUSES},
        "404": lambda: ask("go", model="absent"),
        "break": lambda: ask("break"),
    }


def run(cases: dict[str, Callable[[], Any]]) -> None:
    """Print what each case returned, or what it raised."""
    for name, case in cases.items():
        try:
            got = {"got": case()}
        except Exception as error:  # which one it is, is the result
            got = raised(error)
        sys.stdout.write(json.dumps({"case": name, **got}, default=str) + "\n")
        sys.stdout.flush()


def raised(error: BaseException) -> dict[str, Any]:
    """Its class and text, and what it or the error that it comes from says of the response."""
    causes = [error]
    while (cause := causes[-1].__cause__ or causes[-1].__context__) is not None:
        causes.append(cause)
    status = next((each.status_code for each in causes if hasattr(each, "status_code")), None)
    response = next((each.response for each in causes if hasattr(each, "response")), None)
    retry_after = response.headers.get("retry-after") if response is not None else None
    return {"raised": type(error).__name__, "text": str(error), "status": status, "retry_after": retry_after}
