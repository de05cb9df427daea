"""Predictions for prompts with images, against the cached tokens that the engine reports.

Needs a deployment of one engine with a model that reads images, and nothing else that sends requests:

    python -m kvrouter.tokens.tiny --images DIR        # for a mocker or a vLLM with --load-format dummy
    python -m kvrouter serve --engine URL --port 8000 --admin-port 8001
    python -m scripts.kit.images --url http://127.0.0.1:8000 --admin http://127.0.0.1:8001 --model NAME
"""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeAlias

from rich.table import Table

from scripts.kit.engine_tests.answers import ask
from scripts.kit.engine_tests.workload import Request
from scripts.kit.http_client import Client
from scripts.kit.script import new_console, run, table_of

# Small ones of every format and colour mode that is read.
FILE = Path(__file__).resolve().parents[2] / "tests" / "data" / "images.json"
WORDS = "The quick brown fox jumps over the lazy dog, and then it rests. " * 6
# An engine announces blocks within its next step, and an agent forwards them within 10 ms.
SETTLE_S = 0.2

Json: TypeAlias = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Result:
    """What the router says of the images, and whether cached tokens and length are as predicted."""

    kind: str
    media: str
    is_equal: bool
    cached_tokens: int


def requests(images: dict[str, str]) -> Iterator[Request]:
    """Every image twice, a conversation, the other APIs, uuids, a salt; `images` are base64."""
    names = [*images]
    for name in names:
        yield from 2 * [_chat("image", _user(name, _image(images[name])))]
    turns: list[Json] = []
    for number in range(4):
        shown = [_image(images[names[number % len(names)]])] if number % 2 == 0 else []
        turns += [_user(f"turn {number}", *shown), {"role": "assistant", "content": "I see."}]
        yield _chat("conversation", *turns[:-1])
    first = images[names[0]]
    source = {"type": "base64", "media_type": "image/png", "data": first}
    said = [{"type": "image", "source": source}, {"type": "text", "text": WORDS}]
    body: Json = {"messages": [{"role": "user", "content": said}], "max_tokens": 2}
    yield from 2 * [Request("messages", "/v1/messages", body, 0)]
    shown_first = {"type": "input_image", "image_url": _url(first), "detail": "auto"}
    parts = [shown_first, {"type": "input_text", "text": WORDS}]
    item = {"type": "message", "role": "user", "content": parts}
    body = {"input": [item], "max_output_tokens": 2, "store": False}
    yield from 2 * [Request("responses", "/v1/responses", body, 0)]
    yield from 2 * [_chat("uuid", _user("uuid", _image(first, uuid="a picture")))]
    alone = {"type": "image_url", "image_url": None, "uuid": "a picture"}
    yield _chat("uuid without image", _user("uuid", alone))
    salted = _chat("salt", _user("salt", _image(first)))
    yield from 2 * [replace(salted, body=salted.body | {"cache_salt": "tenant"})]


def main(arguments: Sequence[str] | None = None) -> int:
    """1 if a prediction that is called exact is not."""
    parser = argparse.ArgumentParser(prog="python -m scripts.kit.images", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--url", default="http://127.0.0.1:8000", help="the frontend")
    parser.add_argument("--admin", default="http://127.0.0.1:8001", help="its admin listener")
    parser.add_argument("--model", required=True)
    parser.add_argument("--block-size", type=int, default=16, help="of the engine")
    given = parser.parse_args(arguments)
    return run("images", _check(given))


async def _check(given: argparse.Namespace) -> int:
    results = await _run(given.url, given.admin, given.model, given.block_size)
    new_console().print(_table(results))
    return int(any(one.media == "exact" and not one.is_equal for one in results))


async def _run(url: str, admin: str, model: str, block_size: int) -> list[Result]:
    images = {each["name"]: each["base64"] for each in json.loads(FILE.read_text("utf-8"))}
    results = []
    async with Client() as client:
        for number, request in enumerate(requests(images)):
            answer = await ask(client, url, replace(request, body={"model": model} | request.body))
            sample = answer.sample(number, "", request, block_size)
            (decision,) = (await client.get_json(f"{admin}/decisions?limit=1"))["decisions"]
            is_equal = sample.is_exact and decision["isl"] == sample.prompt_tokens
            results.append(Result(request.kind, decision.get("media", ""), is_equal, sample.cached_tokens))
            await asyncio.sleep(SETTLE_S)
    return results


def _table(results: Sequence[Result]) -> Table:
    rows = []
    for kind in dict.fromkeys(one.kind for one in results):
        here = [one for one in results if one.kind == kind]
        exact = [one for one in here if one.media == "exact"]
        equal = f"{sum(one.is_equal for one in exact)} of {len(exact)}"
        rows.append([kind, len(here), len(exact), equal, f"{sum(one.cached_tokens for one in here):,}"])
    columns = ("request", "sent", "called exact", "cached tokens and length equal", "cached tokens")
    return table_of("prompts with images: tokens predicted and reported", columns, rows)


def _chat(kind: str, *messages: Json) -> Request:
    return Request(kind, "/v1/chat/completions", {"messages": [*messages], "max_tokens": 2}, 0)


def _user(name: str, *images: Json) -> Json:
    return {"role": "user", "content": [_text(f"{name}: {WORDS}"), *images, _text(WORDS)]}


def _text(text: str) -> Json:
    return {"type": "text", "text": text}


def _image(data: str, **more: Any) -> Json:
    return {"type": "image_url", "image_url": {"url": _url(data)}, **more}


def _url(data: str) -> str:
    return f"data:image/png;base64,{data}"


if __name__ == "__main__":
    sys.exit(main())
