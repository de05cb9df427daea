"""litellm: streams, a call, an object, errors."""

from __future__ import annotations

from typing import Any

import litellm
import pydantic

from tests.e2e.programs.cases import FUNCTION, MODEL, URL, failures, run, says


class City(pydantic.BaseModel):
    """What the engine's text or call is parsed to."""

    city: str


def ask(text: str = "go", model: str = MODEL, **more: Any) -> Any:
    """The whole answer, put together from a stream by the package."""
    asked: dict[str, Any] = {"api_base": f"{URL}/v1", "api_key": "none", "max_retries": 0}
    usage = {"include_usage": True}
    chunks = litellm.completion(
        f"openai/{model}", says(text), stream=True, stream_options=usage, **asked, **more
    )
    return litellm.stream_chunk_builder(list(chunks))


def text() -> Any:
    """Text and usage of a stream."""
    answer = ask()
    return [answer.choices[0].message.content, answer.usage.total_tokens]


def call() -> Any:
    """A call from its pieces."""
    choice = ask(tools=[FUNCTION]).choices[0]
    (called,) = choice.message.tool_calls
    return [choice.finish_reason, called.function.name, called.function.arguments]


def parsed() -> Any:
    """An object of the client's type."""
    return City.model_validate_json(ask(response_format=City).choices[0].message.content).city


if __name__ == "__main__":
    litellm.suppress_debug_info = True  # it would print advice among the results
    run({"text": text, "call": call, "object": parsed, **failures(ask)})
