"""Conversations with images: overlap goes past them, and is what the engine's cache had."""

from __future__ import annotations

import json
import shutil
import uuid
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from kvrouter.core.tables.predictions import PredictionKind
from kvrouter.lab.mocker.engine import EngineConfig
from kvrouter.tokens.tiny import build_tiny_model
from kvrouter.worker.options import worker_id_of
from scripts.kit.engine_tests.answers import read
from scripts.kit.http_client import Head
from scripts.kit.images import requests
from tests.e2e.fleet import Fleet, running_fleet, until

IMAGES = {
    each["name"]: each["base64"]
    for each in json.loads(Path(__file__).parent.parent.joinpath("data", "images.json").read_text("utf-8"))
}
TEXT = "What is it that can be seen in the picture, and what is it not? " * 8


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The small model that reads images."""
    path = tmp_path_factory.mktemp("model") / "tiny-vl"
    build_tiny_model(path, images=True)
    return path


@pytest.fixture
async def fleet(nats_url: str, reader: Path) -> AsyncIterator[Fleet]:
    """Two frontends in mode kv with two mockers of a model that reads images."""
    engine = EngineConfig(num_blocks=2048 + 1)
    async with running_fleet(
        nats_url, uuid.uuid4().hex, mockers=2, model_path=reader, engine=engine
    ) as running:
        yield running


def shown(name: str) -> dict[str, Any]:
    """An image as chats carry it."""
    url = f"data:image/png;base64,{IMAGES[name]}"
    return {"type": "image_url", "image_url": {"url": url}}


def user(*content: dict[str, Any]) -> dict[str, Any]:
    return {"role": "user", "content": [*content, {"type": "text", "text": TEXT}]}


async def asked(fleet: Fleet, number: int, path: str, **body: Any) -> tuple[int, int, str]:
    """The tokens that were in the cache, by the engine and by the router, and the worker."""
    url = fleet.frontends[number % 2].url
    async with fleet.http.post(f"{url}{path}", json={"model": "tiny", **body}) as http:
        answer = await http.json()
        assert 200 == http.status, answer
        headers = http.headers
    await _until_indexed(fleet)
    cached = read(path, Head(200, {}), [answer]).cached_tokens
    return cached, 16 * int(headers["x-kvrouter-overlap-blocks"]), headers["x-kvrouter-worker"]


async def _until_indexed(fleet: Fleet) -> None:
    held = {worker_id_of(mocker.url): mocker.engine.cache for mocker in fleet.mockers}
    routers = [router for each in fleet.frontends for router in each.replica.routers.values()]
    await until(
        lambda: all(
            not any(router.pool.active.owners())
            and router.pool.index.digest(target)[0] == len(set(held[target.worker_id].cached_hashes()))
            for router in routers
            for target in router.pool.targets
        )
    )


async def test_conversation(fleet: Fleet) -> None:
    """The same images in a chat, over three APIs and two replicas: all of the prompt before is found again.

    1,200 × 900 pixels are 234 tokens. Other images at the same place end the overlap there.
    """
    chat = [user(shown("large.png"), shown("rgb.jpg"))]
    turns = [await asked(fleet, 0, "/v1/chat/completions", messages=chat, max_tokens=2)]
    chat += [{"role": "assistant", "content": "A"}, user(shown("lossy-alpha.webp"))]
    turns.append(await asked(fleet, 1, "/v1/chat/completions", messages=chat, max_tokens=2))
    chat += [{"role": "assistant", "content": "B"}, user()]
    turns.append(await asked(fleet, 0, "/v1/chat/completions", messages=chat, max_tokens=2))

    image = {"type": "base64", "media_type": "image/png"}
    same = [{"type": "image", "source": image | {"data": IMAGES[name]}} for name in ("large.png", "rgb.jpg")]
    turns.append(await asked(fleet, 1, "/v1/messages", messages=[user(*same)], max_tokens=2))
    inputs = [
        {"type": "input_image", "image_url": shown(name)["image_url"]["url"], "detail": "auto"}
        for name in ("large.png", "rgb.jpg")
    ]
    said = {"type": "message", "role": "user", "content": [*inputs, {"type": "input_text", "text": TEXT}]}
    turns.append(await asked(fleet, 0, "/v1/responses", input=[said], max_output_tokens=2))
    other = [user(shown("large.png"), shown("progressive.jpg"))]
    turns.append(await asked(fleet, 1, "/v1/chat/completions", messages=other, max_tokens=2))

    assert [predicted for _, predicted, _ in turns] == [cached for cached, _, _ in turns]
    (none, second, third, messages, responses, changed) = (cached for cached, _, _ in turns)
    assert 0 == none < 234 + 22 < second < third
    assert min(messages, responses) > 234 + 22
    # up to the other image: the last block before it may begin in the first one
    assert 234 <= changed < messages
    assert 1 == len({worker for _, _, worker in turns})
    records = [
        record
        for frontend in fleet.frontends
        for router in frontend.replica.routers.values()
        for record in router.predictions.records.values()
    ]
    assert {PredictionKind("chat"), PredictionKind("messages"), PredictionKind("responses")} == {
        kind for record in records for kind in record.kinds
    }
    assert all(ours == theirs for record in records for ours, theirs in [record.last_lengths])


async def test_the_script(fleet: Fleet) -> None:
    """What scripts/kit/images.py sends: all are found again, with the overlap that the engine has."""
    some = {name: IMAGES[name] for name in ("lossy-alpha.webp", "palette.gif")}
    turns = [
        (request.kind, *await asked(fleet, 0, request.path, **request.body)) for request in requests(some)
    ]

    assert [predicted for _, _, predicted, _ in turns] == [cached for _, cached, _, _ in turns]
    # of each pair, and of each conversation, all but the first; the two APIs send the same chat
    assert {
        "image": 2,
        "conversation": 3,
        "messages": 1,
        "responses": 2,
        "uuid": 1,
        "uuid without image": 1,
        "salt": 1,
    } == {kind: sum(one == kind and cached > 128 for one, cached, _, _ in turns) for kind, *_ in turns}


async def test_engines_tell_the_number_of_tokens(nats_url: str, reader: Path, tmp_path: Path) -> None:
    """Of another kind of model the first request with an image ends before it; later ones know its tokens."""
    shutil.copytree(reader, tmp_path / "here")
    config = tmp_path / "here" / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text("utf-8")) | {"model_type": "other"}), "utf-8")
    body = {"messages": [user(shown("large.png"))], "max_tokens": 2}
    async with running_fleet(
        nats_url,
        uuid.uuid4().hex,
        frontends=1,
        mockers=1,
        engine_model=reader,
        flags=["--model-path", str(tmp_path / "here")],
    ) as fleet:
        tokens = fleet.frontends[0].tokens
        images = tokens.encoders.default.images
        assert images is not None
        first = await asked(fleet, 0, "/v1/chat/completions", **body)
        await until(lambda: len(images) == 1)
        second = await asked(fleet, 0, "/v1/chat/completions", **body)

    assert (0, 0) == first[:2]
    assert second[0] == second[1] > 234
    assert {"answer": 1, "exact": 1} == dict(tokens.blocks.media)


async def test_says_where_overlap_ends(fleet: Fleet) -> None:
    """Before an image that only the engine can fetch; the decision and a metric say so."""
    address = {"type": "image_url", "image_url": {"url": "https://example.com/cat.png"}}
    first = [{"role": "user", "content": TEXT}]

    await asked(fleet, 0, "/v1/chat/completions", messages=first, max_tokens=2)
    _, predicted, _ = await asked(
        fleet, 0, "/v1/chat/completions", messages=[*first, user(address)], max_tokens=2
    )
    admin = fleet.frontends[0].admin_url
    async with fleet.http.get(f"{admin}/decisions?limit=1") as http:
        (decision,) = (await http.json())["decisions"]
    async with fleet.http.get(f"{admin}/metrics") as http:
        metrics = await http.text()

    assert predicted > 0
    assert "url" == decision["media"]
    assert 'kvrouter_media_prompts_total{outcome="url"} 1.0' in metrics
