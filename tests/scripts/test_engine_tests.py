"""The requests and the verdict of `scripts/test-vllm` and `test-sglang`; tests start no real engines."""

from __future__ import annotations

import itertools
import json
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from scripts.kit.engine_tests.adapters import write_adapter
from scripts.kit.engine_tests.answers import (
    Answer,
    Sample,
    events_of,
    read_completion,
    read_message,
    read_response,
)
from scripts.kit.engine_tests.engines import Kind, find_program
from scripts.kit.engine_tests.report import Report
from scripts.kit.engine_tests.script import main
from scripts.kit.engine_tests.workload import Request, Workload
from scripts.kit.fleet import FleetError
from scripts.kit.http_client import Head, HttpError

REQUEST = Request("chat", "/v1/chat/completions", {}, 0)
HEADERS = {"x-kvrouter-worker": "a", "x-kvrouter-overlap-blocks": "2"}


def sample(predicted: int, cached: int) -> Sample:
    """A sample."""
    return Sample(1, "both engines", "chat", 0, "a", predicted, cached, 100)


def test_adapter_is_whole(tiny: Path, tmp_path: Path) -> None:
    """The tensors' bytes follow one another to the end of the file, at the offsets in the head."""
    write_adapter(tmp_path / "lora", tiny, seed=1)

    data = (tmp_path / "lora" / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    offsets = [tensor["data_offsets"] for tensor in json.loads(data[8 : 8 + length]).values()]
    assert 0 == offsets[0][0]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(offsets))
    assert len(data) - 8 - length == offsets[-1][1]


def test_workload_repeats() -> None:
    """A seed always gives the same requests; every kind comes once before any comes again."""
    first, second = (
        list(itertools.islice(Workload("tiny", ("lora-a", "lora-b"), seed=3), 140)) for _ in range(2)
    )

    assert first == second
    kinds = [request.kind.partition(",")[0] for request in first]
    assert 14 == len(set(kinds[:14])) == len(set(kinds))
    fewer = list(itertools.islice(Workload("tiny", (), 3, "sglang"), 120))
    of_vllm = {"lora", "previous response", "n"}
    assert {*kinds} - of_vllm == {request.kind.partition(",")[0] for request in fewer}
    assert {"/v1/chat/completions", "/v1/completions", "/v1/messages", "/v1/responses"} == {
        request.path for request in first
    }


def next_of(requests: Iterator[Request], kind: str) -> Request:
    """The next request of this kind in the first group."""
    return next(request for request in requests if (request.kind, request.group) == (kind, 0))


def test_a_chat_goes_on() -> None:
    """An answered chat continues in the next one of its group, up to three turns."""
    workload = Workload("tiny", ("lora-a",))
    requests = iter(workload)
    chat = next_of(requests, "chat")

    workload.add_answer(chat, "an answer", "")

    again = next_of(requests, "chat")
    said = [*chat.body["messages"], {"role": "assistant", "content": "an answer"}]
    assert said == again.body["messages"][:-1]
    workload.add_answer(again, "b", "")
    workload.add_answer(next_of(requests, "chat"), "c", "")
    assert 2 == len(next_of(requests, "chat").body["messages"])


def test_a_response_goes_on() -> None:
    """By its id, at one replica; not after its engine died."""
    workload = Workload("tiny", ("lora-a",))
    requests = iter(workload)
    first = next_of(requests, "previous response")
    workload.add_answer(first, "", "resp_1")

    again = next_of(requests, "previous response")
    workload.forget_responses()

    assert "resp_1" == again.body["previous_response_id"]
    assert first.chain == again.chain
    assert "previous_response_id" not in next_of(requests, "previous response").body


CHUNKS = [
    {"choices": [{"index": 0, "delta": {"content": "a"}}, {"index": 1, "delta": {"content": "x"}}]},
    {"choices": [{"index": 0, "delta": {"content": "b"}}]},
    {"choices": [], "usage": {"prompt_tokens": 9, "prompt_tokens_details": {"cached_tokens": 4}}},
]
MESSAGE_EVENTS = [
    {"type": "message_start", "message": {"usage": {"input_tokens": 0}}},
    {"type": "content_block_delta", "delta": {"type": "text_delta", "text": "ab"}},
    {
        "type": "message_delta",
        "usage": {"input_tokens": 3, "cache_read_input_tokens": 4, "cache_creation_input_tokens": 2},
    },
]
RESPONSE = {
    "id": "resp_1",
    "output": [{"content": [{"type": "output_text", "text": "ab"}]}, {"type": "function_call"}],
    "usage": {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4}},
}


@pytest.mark.parametrize(
    ("read", "events"),
    [(read_completion, CHUNKS), (read_message, MESSAGE_EVENTS), (read_response, [{"response": RESPONSE}])],
)
def test_answers_of_each_api(read: Callable[..., Answer], events: list[Any]) -> None:
    """Text and tokens of a stream; of several answers the first."""
    body = b"".join(b"event: x\ndata: %b\n\n" % json.dumps(event).encode() for event in events)

    answer = read(Head(200, {}), events_of(body + b"data: [DONE]\n\n"))

    assert ("ab", 9, 4) == (answer.text, answer.prompt_tokens, answer.cached_tokens)


def test_sample_compares() -> None:
    """The prediction is the header's blocks in tokens; the engine reports the cached tokens."""
    exact = Answer(200, HEADERS, "", 100, 64).sample(1, "both engines", REQUEST, block_size=32)
    over = Answer(200, HEADERS, "", 100).sample(2, "both engines", REQUEST, block_size=32)

    assert (64, 64, True) == (exact.predicted_tokens, exact.cached_tokens, exact.is_exact)
    assert (64, 0, False) == (over.predicted_tokens, over.cached_tokens, over.is_exact)


def test_an_error_ends_the_run() -> None:
    """A failed request ends the run with an error that shows the answer."""
    with pytest.raises(HttpError, match="no workers"):
        Answer(503, {}, "no workers").sample(1, "both engines", REQUEST, block_size=32)
    with pytest.raises(HttpError, match="holds an error"):
        events_of(b'data: {"error": {"message": "oh"}}\n\n')


def test_share_of_exact_predictions() -> None:
    """Overestimates and underestimates both count as differences."""
    report = Report([sample(64, 64), sample(64, 32), sample(0, 32), sample(0, 0)], 0, 0, {"vllm": "0"}, 1.0)

    assert 0.5 == report.exact_share
    assert 2 == len(report.differences)


@pytest.mark.parametrize("kind", ["vllm", "sglang"])
def test_missing_engine(tmp_path: Path, kind: Kind) -> None:
    """A directory without the engine is an error that names the way to make one, and the documentation."""
    with pytest.raises(FleetError, match=f"test-{kind} --build DIR.*docs/engines.md"):
        find_program(kind, tmp_path)


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot start exits with 1 and one line."""
    assert 1 == main([str(tmp_path)])
    assert capsys.readouterr().err.startswith("test-vllm: failed: ")
