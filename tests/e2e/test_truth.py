"""Predictions compared with the mockers' reports: wrong set-ups are flagged soon, correct ones never."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import uuid
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import structlog

from kvrouter.core.wire.hashes import block_seed
from kvrouter.lab.mocker.engine import EngineConfig
from tests.e2e.fleet import Fleet, running_fleet
from tests.frontend.workers import until, until_found

# A wrong set-up must be found within this many requests to one worker.
REQUESTS = 20
# Each of these waits for its judgement: three of each kind.
ONE_BY_ONE = 9
PATIENCE_S = 10.0


def altered(tiny: Path, copy: Path, alter: Callable[[Path], None]) -> Path:
    """A changed copy of the model directory."""
    shutil.copytree(tiny, copy)
    alter(copy)
    return copy


def other_template(path: Path) -> None:
    """A template that begins with another line."""
    config = path / "chat_template.jinja"
    config.write_text("{{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}" + config.read_text())


def template_of_equal_length(path: Path) -> None:
    """A template whose prompts have as many tokens, with a different first one."""
    config = path / "chat_template.jinja"
    config.write_text(config.read_text().replace("<|im_start|>", "<|endoftext|>"))


def other_tokenizer(path: Path) -> None:
    """A tokenizer with fewer merges."""
    file = path / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    tokenizer["model"]["merges"] = tokenizer["model"]["merges"][:200]
    file.write_text(json.dumps(tokenizer))


def chat(number: int, group: int = 0) -> dict[str, Any]:
    """A chat of some ten blocks that shares most of them with its group."""
    system = f"You are assistant number {group}. " * 20
    messages = [{"role": "system", "content": system}, {"role": "user", "content": f"question {number}"}]
    return {"messages": messages, "max_tokens": 4}


def text(number: int, group: int = 0) -> dict[str, Any]:
    """The same prompt as text."""
    return {"prompt": f"Document {group} says a lot. " * 20 + f"question {number} " * 10, "max_tokens": 4}


def tokens(number: int, group: int = 0) -> dict[str, Any]:
    """The same prompt as token ids."""
    return {"prompt": [*range(100 * group, 100 * group + 100), number], "max_tokens": 4}


async def ask(fleet: Fleet, body: dict[str, Any], frontend: int = 0) -> None:
    """Send one request and read its answer."""
    route = "chat/completions" if "messages" in body else "completions"
    url = f"{fleet.frontends[frontend].url}/v1/{route}"
    async with fleet.http.post(url, json={"model": "tiny", **body}) as response:
        await response.read()
        assert 200 == response.status


async def problems(fleet: Fleet, frontend: int = 0) -> list[str]:
    """The problems in /workers."""
    return [text for row in (await fleet.workers(frontend))["targets"] for text in row["problems"]]


async def until_flagged(fleet: Fleet) -> list[str]:
    """The problems, as soon as there are any."""
    return await until_found(lambda: problems(fleet), within_s=PATIENCE_S)


async def until_judged(fleet: Fleet) -> None:
    """Return when no prediction is open and the problems have been computed since."""
    routers = [router for each in fleet.frontends for router in each.replica.routers.values()]
    await until(lambda: not any(router.predictions._expected for router in routers), within_s=PATIENCE_S)
    for each in fleet.frontends:
        each.audit.run()


def metric(page: str, name: str, *labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    lines = [line for line in page.splitlines() if line.startswith(f"{name}{{")]
    return sum(float(line.rpartition(" ")[2]) for line in lines if all(label in line for label in labels))


async def scraped(fleet: Fleet) -> str:
    """/metrics."""
    async with fleet.http.get(f"{fleet.frontends[0].url}/metrics") as response:
        return await response.text()


WRONG: dict[str, tuple[Callable[[Path], None], Callable[[int], dict[str, Any]], str, str]] = {
    "template": (other_template, chat, "tokens", "chat template"),
    "template of equal length": (template_of_equal_length, chat, "hashes", "for chats"),
    "tokenizer, chats": (other_tokenizer, chat, "tokens", "the tokenizer differs"),
    "tokenizer, texts": (other_tokenizer, text, "tokens", "the tokenizer differs"),
}


@pytest.mark.parametrize("case", WRONG)
async def test_wrong_model_path(nats_url: str, tiny: Path, tmp_path: Path, case: str) -> None:
    """Another tokenizer or template is flagged in /workers, in a metric, and once in the log."""
    alter, body, kind, remedy = WRONG[case]
    wrong = altered(tiny, tmp_path / "wrong", alter)
    # The comparison of tokens would find it before any request.
    flags = ["--model-path", str(wrong), "--no-token-comparison"]
    with structlog.testing.capture_logs() as logs:
        async with fleet_of(nats_url, tiny, flags=flags) as fleet:
            for number in range(REQUESTS):
                await ask(fleet, body(number))
            (problem,) = await until_flagged(fleet)
            page = await scraped(fleet)

    assert remedy in problem
    assert "--model-path" in problem
    assert 1 == metric(page, "kvrouter_worker_problem", f'problem="{kind}"')
    assert [problem.split("(")[0]] == [
        entry["problem"].split("(")[0] for entry in logs if entry["event"] == "worker.problem"
    ]


def fleet_of(nats_url: str, tiny: Path, **facts: Any) -> Any:
    """One frontend with one mocker, unless the arguments differ."""
    settings: dict[str, Any] = {"frontends": 1, "mockers": 1, "model_path": tiny, **facts}
    return running_fleet(nats_url, uuid.uuid4().hex, **settings)


@pytest.mark.parametrize("asks_usage", [True, False])
async def test_wrong_salt(
    nats_url: str, tiny: Path, monkeypatch: pytest.MonkeyPatch, asks_usage: bool
) -> None:
    """A salt that is missing in the hashes is found, with usage in the answers or without."""

    def unsalted(lora_name: str | None, _salt: str | None) -> int:
        return block_seed(lora_name)

    monkeypatch.setattr("kvrouter.prompts.ways.block_seed", unsalted)
    async with fleet_of(nats_url, tiny) as fleet:
        for number in range(REQUESTS):
            await ask(fleet, {**text(number, 1), "cache_salt": "s", "stream": not asks_usage})
            await ask(fleet, {**text(number), "stream": not asks_usage})
        (problem,) = await until_flagged(fleet)

    assert "for texts with cache_salt" in problem
    assert "do not carry the cache_salt" in problem


async def test_wrong_block_size(nats_url: str, tiny: Path) -> None:
    """A block size that differs from the engines' is one problem, and no other appears with it."""
    flags = ["--kv-cache-block-size", "32"]
    async with fleet_of(nats_url, tiny, flags=flags) as fleet:
        for number in range(REQUESTS):
            await ask(fleet, text(number))
        await until_judged(fleet)
        (problem,) = await problems(fleet)
        page = await scraped(fleet)

    assert "block size 16, pool has 32" in problem
    assert "--kv-cache-block-size" in problem
    assert 1 == metric(page, "kvrouter_worker_problem", 'problem="block_size"')
    assert 0 == metric(page, "kvrouter_evidence_total", 'check="announced"')


async def test_no_events(nats_url: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine whose events do not arrive is flagged, with the flags to start them."""
    monkeypatch.setattr("kvrouter.lab.mocker.publisher.Publisher.publish", lambda *_args: None)
    async with fleet_of(nats_url, tiny) as fleet:
        for number in range(REQUESTS):
            await ask(fleet, text(number))
        (problem,) = await until_flagged(fleet)

    assert "no KV event has arrived from it" in problem
    assert "--kv-events-config" in problem


async def test_problem_disappears(nats_url: str, tiny: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """When the blocks arrive again, the problem disappears by itself."""
    with monkeypatch.context() as patched:
        patched.setattr("kvrouter.prompts.ways.block_seed", lambda *_: block_seed(salt="other"))
        async with fleet_of(nats_url, tiny) as fleet:
            for number in range(REQUESTS):
                await ask(fleet, text(number))
            await until_judged(fleet)
            assert await problems(fleet)

            patched.undo()
            for number in range(REQUESTS):
                await ask(fleet, text(number))
            await until_judged(fleet)
            assert [] == await problems(fleet)


MIXED = [chat, text, tokens]


def mixed(chance: random.Random, number: int) -> dict[str, Any]:
    """A request of any kind, of one of 24 groups, sometimes with a salt."""
    body = chance.choice(MIXED)(number, chance.randrange(24))
    return body | ({"cache_salt": "s"} if chance.random() < 0.2 else {})


async def test_no_false_alarm(nats_url: str, tiny: Path) -> None:
    """Mixed traffic over two replicas, small caches that evict, siblings and salts cause no problem."""
    small = EngineConfig(num_blocks=512, max_model_len=2048)
    chance = random.Random(7)
    with structlog.testing.capture_logs() as logs:
        async with fleet_of(nats_url, tiny, frontends=2, mockers=2, engine=small) as fleet:
            for wave in range(12):
                bodies = [
                    mixed(chance, 100 * wave + number) | {"stream": number % 3 == 0} for number in range(24)
                ]
                await asyncio.gather(*(ask(fleet, body, number % 2) for number, body in enumerate(bodies)))
            for number in range(REQUESTS):
                await ask(fleet, text(number, number % 3), number % 2)
            await until_judged(fleet)
            found = [await problems(fleet, number) for number in range(2)]
            page = await scraped(fleet)

    assert [[], []] == found
    assert [] == [entry for entry in logs if entry["event"] == "worker.problem"]
    assert 0 == metric(page, "kvrouter_evidence_total", 'check="prompt_length"', 'result="different"')
    assert 50 < metric(page, "kvrouter_evidence_total", 'check="prompt_length"', 'result="same"')
    assert 50 < metric(page, "kvrouter_evidence_total", 'check="announced"', 'result="found"')
    assert 50 < metric(page, "kvrouter_predictions_total")


@pytest.mark.parametrize("lookahead", [0, 1])
async def test_sequential_predictions_are_exact(nats_url: str, tiny: Path, lookahead: int) -> None:
    """One by one, every prediction equals the engine's report; the histogram's only step is at 0."""
    engine = EngineConfig(lookahead=lookahead)
    async with fleet_of(nats_url, tiny, engine=engine) as fleet:
        for number in range(ONE_BY_ONE):
            await ask(fleet, MIXED[number % 3](number))
            await until_judged(fleet)
        page = await scraped(fleet)

    # The last blocks of a request may be announced after the next one was placed: it is in flight then. And a
    # heartbeat may have met a request that waits: predictions of the next second are doubtful then.
    exact = [metric(page, "kvrouter_predictions_total", 'result="exact"', f'source="{source}"')
             for source in ("index", "in_flight", "doubtful")]  # fmt: skip
    assert ONE_BY_ONE == sum(exact)
    assert exact[0]
    assert ONE_BY_ONE == metric(page, "kvrouter_predictions_total")
    assert 0 == metric(page, "kvrouter_prediction_error_blocks_bucket", 'le="-1"')
    assert ONE_BY_ONE == metric(page, "kvrouter_prediction_error_blocks_bucket", 'le="0"')
    assert 1 == metric(page, "kvrouter_prediction_exact_ratio")
    reported = metric(page, "kvrouter_cached_tokens_total", 'by="reported"')
    assert 0 < reported == metric(page, "kvrouter_cached_tokens_total", 'by="predicted"')
