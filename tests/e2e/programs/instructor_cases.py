"""instructor: objects of a client's type, whole and in parts, by call and by schema; errors."""

from __future__ import annotations

from typing import Any

import instructor
import openai
import pydantic

from tests.e2e.programs.cases import MODEL, URL, failures, run, says


class City(pydantic.BaseModel):
    """What the engine's answer is parsed to."""

    city: str


def client(mode: Any = instructor.Mode.TOOLS) -> Any:
    """A client that does not retry."""
    return instructor.from_openai(
        openai.OpenAI(base_url=f"{URL}/v1", api_key="none", max_retries=0), mode=mode
    )


def ask(text: str = "go", model: str = MODEL) -> Any:
    """The last state of an object that arrives in parts."""
    asked: dict[str, Any] = {"model": model, "messages": says(text), "max_retries": 0}
    return list(client().create_partial(response_model=City, **asked))[-1]


def whole(mode: Any) -> Any:
    """An object from one answer, and the usage."""
    asked: dict[str, Any] = {"model": MODEL, "messages": says("go"), "response_model": City}
    city, answer = client(mode).create_with_completion(**asked)
    return [city.city, answer.usage.total_tokens]


def text() -> Any:
    """A stream without a type is the engine's."""
    stream = client().create(model=MODEL, messages=says("go"), response_model=None, stream=True)
    return "".join(event.choices[0].delta.content or "" for event in stream if event.choices)


if __name__ == "__main__":
    run(
        {
            "text": text,
            "call": lambda: whole(instructor.Mode.TOOLS),
            "object": lambda: whole(instructor.Mode.JSON_SCHEMA),
            "parts": lambda: ask().city,
            **failures(ask),
        }
    )
