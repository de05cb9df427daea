"""langchain-openai: streams, a call, an object, errors."""

from __future__ import annotations

import functools
import operator
from typing import Any

import pydantic
from langchain_openai import ChatOpenAI

from tests.e2e.programs.cases import FUNCTION, MODEL, URL, failures, run


class City(pydantic.BaseModel):
    """What the engine's answer is parsed to."""

    city: str


def chat(model: str = MODEL) -> Any:
    """A client that does not retry."""
    return ChatOpenAI(model=model, base_url=f"{URL}/v1", api_key="none", max_retries=0, stream_usage=True)


def ask(text: str = "go", model: str = MODEL, **bound: Any) -> Any:
    """The whole message: the sum of the pieces of a stream."""
    return functools.reduce(operator.add, chat(model).bind(**bound).stream(text))


def text() -> Any:
    """Text and usage of a stream."""
    message = ask()
    return [message.content, message.usage_metadata["total_tokens"]]


def call() -> Any:
    """A call from its pieces."""
    message = ask(tools=[FUNCTION])
    (called,) = message.tool_calls
    return [message.response_metadata["finish_reason"], called["name"], called["args"]]


def parsed() -> Any:
    """An object of the client's type, by schema and by call; whole and streamed."""
    by_schema = chat().with_structured_output(City)
    by_call = chat().with_structured_output(City, method="function_calling")
    whole = [each.invoke("go").city for each in (by_schema, by_call)]
    return [*whole, list(by_call.stream("go"))[-1].city]


if __name__ == "__main__":
    run({"text": text, "call": call, "object": parsed, **failures(ask)})
