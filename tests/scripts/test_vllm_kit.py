"""The requests and the verdict of `scripts/test-vllm`; tests start no real engines."""

from __future__ import annotations

import itertools
import json
import struct
from pathlib import Path

import pytest

from kvrouter.tokens.tiny import build_tiny_model
from scripts.kit.fleet import FleetError
from scripts.kit.http_client import HttpError
from scripts.kit.vllm.adapters import write_adapter
from scripts.kit.vllm.answers import Answer, Sample
from scripts.kit.vllm.engines import find_vllm
from scripts.kit.vllm.report import Report
from scripts.kit.vllm.script import main
from scripts.kit.vllm.workload import Request, Workload

REQUEST = Request("chat", "/v1/chat/completions", {}, 0)
HEADERS = {"x-kvrouter-worker": "a", "x-kvrouter-overlap-blocks": "2"}


def sample(predicted: int, cached: int) -> Sample:
    """A sample."""
    return Sample(1, "both engines", "chat", 0, "a", predicted, cached, 100)


def test_adapter_is_whole(tmp_path: Path) -> None:
    """The tensors' bytes follow one another to the end of the file, at the offsets in the head."""
    build_tiny_model(tmp_path / "model")

    write_adapter(tmp_path / "lora", tmp_path / "model", seed=1)

    data = (tmp_path / "lora" / "adapter_model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    offsets = [tensor["data_offsets"] for tensor in json.loads(data[8 : 8 + length]).values()]
    assert 0 == offsets[0][0]
    assert all(left[1] == right[0] for left, right in itertools.pairwise(offsets))
    assert len(data) - 8 - length == offsets[-1][1]


def test_workload_repeats() -> None:
    """A seed always gives the same requests, of every kind."""
    first, second = (
        list(itertools.islice(Workload("tiny", ("lora-a", "lora-b"), seed=3), 100)) for _ in range(2)
    )

    assert first == second
    assert {"chat", "stream", "text", "ids", "salt", "lora"} == {request.kind for request in first}


def test_a_chat_goes_on() -> None:
    """An answered chat continues in the next one of its group, up to three turns."""
    workload = Workload("tiny", ("lora-a",))
    chats = [request for request in itertools.islice(workload, 200) if request.kind == "chat"]
    first = next(chat for chat in chats if chat.group == 0)

    workload.add_answer(first, "an answer")

    again = next(request for request in workload if request.kind == "chat" and request.group == 0)
    assert [*first.body["messages"], {"role": "assistant", "content": "an answer"}] == again.body["messages"][
        :-1
    ]


def test_sample_compares() -> None:
    """The prediction is the header's blocks in tokens; the usage has the cached tokens."""
    usage = {"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}

    exact = Answer(200, HEADERS, "", usage).sample(1, "both engines", REQUEST, block_size=32)
    over = Answer(200, HEADERS, "", {"prompt_tokens": 100}).sample(2, "both engines", REQUEST, block_size=32)

    assert (64, 64, True) == (exact.predicted_tokens, exact.cached_tokens, exact.is_exact)
    assert (64, 0, False) == (over.predicted_tokens, over.cached_tokens, over.is_exact)


def test_an_error_ends_the_run() -> None:
    """A failed request ends the run with an error that shows the answer."""
    with pytest.raises(HttpError, match="no workers"):
        Answer(503, {}, "no workers", {}).sample(1, "both engines", REQUEST, block_size=32)


def test_share_of_exact_predictions() -> None:
    """Overestimates and underestimates both count as differences."""
    report = Report([sample(64, 64), sample(64, 32), sample(0, 32), sample(0, 0)], 0, {"vllm": "0"}, 1.0)

    assert 0.5 == report.exact_share
    assert 2 == len(report.differences)


def test_missing_vllm(tmp_path: Path) -> None:
    """A directory without vLLM is an error that names the documentation."""
    with pytest.raises(FleetError, match=r"docs/engines.md"):
        find_vllm(tmp_path)


def test_exit_code(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """A run that cannot start exits with 1 and one line."""
    assert 1 == main([str(tmp_path)])
    assert capsys.readouterr().err.startswith("test-vllm: failed: ")
