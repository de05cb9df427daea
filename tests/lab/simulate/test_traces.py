"""Traces: reading, writing, names of blocks."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from kvrouter.lab.simulate.traces import (
    CONVERSATION_EXCERPT,
    TraceError,
    TraceRequest,
    named_blocks,
    read_trace,
    write_trace,
)

GOOD = {"timestamp": 5, "input_length": 700, "output_length": 9, "hash_ids": [0, 7]}


@pytest.fixture
def trace_file(tmp_path: Path) -> Path:
    """The path of a test's trace."""
    return tmp_path / "trace.jsonl"


def write(path: Path, *lines: object) -> None:
    """Write one JSON value per line; strings are written unchanged."""
    path.write_text("".join(f"{line if isinstance(line, str) else json.dumps(line)}\n" for line in lines))


def at(arrival_s: float, prompt_tokens: int = 512, hash_ids: tuple[int, ...] = (0,)) -> TraceRequest:
    """A request of a trace."""
    return TraceRequest(arrival_s, prompt_tokens, 80, hash_ids)


# --- reading ---


def test_shipped_excerpt() -> None:
    """It has 3,000 requests over 987 s, and all of them share block 0."""
    requests = read_trace(CONVERSATION_EXCERPT)

    assert (3000, 0.0, 987.0) == (len(requests), requests[0].arrival_s, requests[-1].arrival_s)
    assert {0} == {request.hash_ids[0] for request in requests}
    assert TraceRequest(0.0, 6758, 500, tuple(range(14))) == requests[0]


def test_limit() -> None:
    """Only `limit` requests are read."""
    assert 3 == len(read_trace(CONVERSATION_EXCERPT, 3))


def test_time_starts_with_the_first_request(trace_file: Path) -> None:
    """Times are relative to the first timestamp."""
    write(trace_file, GOOD, {**GOOD, "timestamp": 2005})

    assert [0.0, 2.0] == [request.arrival_s for request in read_trace(trace_file)]


def test_other_fields_are_ignored(trace_file: Path) -> None:
    """A newer trace may have more fields."""
    write(trace_file, {**GOOD, "tenant": "a"})

    assert 1 == len(read_trace(trace_file))


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "truncated"),
        ("", "truncated"),
        ("[1]", "Expected `object`"),
        ({"timestamp": 5}, "missing required field `input_length`"),
        ({**GOOD, "timestamp": -1}, r">= 0.*\$\.timestamp"),
        ({**GOOD, "timestamp": 1.5}, r"\$\.timestamp"),
        ({**GOOD, "input_length": 0}, r">= 1.*\$\.input_length"),
        ({**GOOD, "output_length": None}, r"\$\.output_length"),
        ({**GOOD, "hash_ids": ["a", "b"]}, r"\$\.hash_ids"),
        ({**GOOD, "hash_ids": [0, -7]}, r"\$\.hash_ids"),
        ({**GOOD, "hash_ids": [0, 2**64]}, r"\$\.hash_ids"),
        ({**GOOD, "hash_ids": [0]}, "input_length 700 needs 2 hash ids of 512 tokens, not 1"),
        ({**GOOD, "timestamp": 4}, "timestamp 4 is before the previous line's"),
    ],
)
def test_malformed_line(trace_file: Path, line: object, message: str) -> None:
    """The error names the file, the line and the problem."""
    write(trace_file, GOOD, line)

    with pytest.raises(TraceError, match=f"trace.jsonl:2: .*{message}"):
        read_trace(trace_file)


def bailian(chat_id: int, timestamp: float, ids: list[int], tokens: int) -> dict[str, object]:
    """A line of a Qwen-Bailian trace."""
    return {
        "chat_id": chat_id, "parent_chat_id": -1, "timestamp": timestamp, "input_length": tokens,
        "output_length": 9, "type": "text", "turn": 1, "hash_ids": ids,
    }  # fmt: skip


def test_qwen_bailian(trace_file: Path) -> None:
    """Ids of 16 tokens, seconds; an id names a block by its own tokens, and here all before it, too."""
    write(
        trace_file, bailian(1, 61.25, [7, 8, 7], 40), bailian(2, 62.5, [7, 8, 9], 48), bailian(3, 63, [8], 16)
    )

    first, second, third = read_trace(trace_file)

    assert [0.0, 1.25, 1.75] == [one.arrival_s for one in (first, second, third)]
    assert (40, 9, 16) == (first.prompt_tokens, first.output_tokens, first.id_tokens)
    assert first.hash_ids[:2] == second.hash_ids[:2]
    assert 4 == len({*first.hash_ids, *second.hash_ids}), "7 at the end is not 7 at the beginning"
    assert first.hash_ids[1] != third.hash_ids[0], "8 without 7 before it is another block"


def test_written_and_read(trace_file: Path) -> None:
    """A trace of kept decisions: ids of any size, equal where they were; a partial block gets an id."""
    kept = [TraceRequest(0.0, 130, 7, (1 << 63, 5), 64), TraceRequest(1.5, 128, 7, (1 << 63, 6), 64)]
    write_trace(trace_file, kept)

    first, second = read_trace(trace_file)

    assert (kept[0].prompt_tokens, 7, 64, 3) == (
        first.prompt_tokens, first.output_tokens, first.id_tokens, len(first.hash_ids),
    )  # fmt: skip
    assert (1.5, 2) == (second.arrival_s, len(second.hash_ids))
    assert first.hash_ids[0] == second.hash_ids[0]
    assert 4 == len({*first.hash_ids, *second.hash_ids})
    with pytest.raises(TraceError, match=r"cannot write the trace .*: Is a directory"):
        write_trace(trace_file.parent, kept)


def test_sizes_of_ids_differ(trace_file: Path) -> None:
    """One trace has one size."""
    write(trace_file, {**GOOD, "block_size": 350}, {**GOOD, "timestamp": 6})

    with pytest.raises(TraceError, match=r"trace\.jsonl:2: block_size 512, the first line has 350"):
        read_trace(trace_file)


def test_blocks_of_short_ids() -> None:
    """Blocks are made of several ids, or ids of several blocks; other sizes are an error."""
    one = TraceRequest(0.0, 70, 1, (1, 2, 3, 4, 5), 16)
    other = TraceRequest(0.0, 64, 1, (1, 2, 3, 9), 16)

    assert [4, 4, 2, 1] == [len(named_blocks(one, size)) for size in (16, 16, 32, 64)]
    assert named_blocks(one, 32)[0] == named_blocks(other, 32)[0]
    assert named_blocks(one, 32)[1] != named_blocks(other, 32)[1]
    with pytest.raises(TraceError, match="--block-size 24: must divide the trace's 16 tokens"):
        named_blocks(one, 24)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        (bailian(2, 61, [7], 17), "needs 2 hash ids of 16 tokens, not 1"),
        (bailian(2, 60.5, [7], 16), r"timestamp 60.5 is before the previous line's: sort"),
        ({**GOOD, "timestamp": 70}, "missing required field `chat_id`"),
        ({**bailian(2, 61, [7], 16), "timestamp": 1e300}, r"\$\.timestamp"),
    ],
)
def test_malformed_bailian_line(trace_file: Path, line: object, message: str) -> None:
    """The error names the line and the problem."""
    write(trace_file, bailian(1, 61, [7], 16), line)

    with pytest.raises(TraceError, match=f"trace.jsonl:2: .*{message}"):
        read_trace(trace_file)


def test_two_formats_in_a_file(trace_file: Path) -> None:
    """They count time differently."""
    write(trace_file, {**GOOD, "timestamp": 0}, bailian(1, 61.0, [7], 16))

    with pytest.raises(TraceError, match=r"trace.jsonl:2: .*timestamp"):
        read_trace(trace_file)
    write(trace_file, {**GOOD, "timestamp": 0}, bailian(1, 61, [7], 16))
    with pytest.raises(TraceError, match=r"trace\.jsonl:2: has a chat_id, the first line has none"):
        read_trace(trace_file)


def test_no_line_ends(trace_file: Path) -> None:
    """A file of one long line is not read as a whole."""
    trace_file.write_bytes(b"[" * (8 * 1024 * 1024 + 2))

    with pytest.raises(TraceError, match=r"trace.jsonl:1: longer than 8388608 bytes: a line is"):
        read_trace(trace_file)


def test_broken_archive(tmp_path: Path) -> None:
    """The error names the line that could not be read."""
    whole = CONVERSATION_EXCERPT.read_bytes()
    (tmp_path / "cut.gz").write_bytes(whole[: len(whole) // 2])
    (tmp_path / "not.gz").write_bytes(b"{}")

    with pytest.raises(TraceError, match=r"cannot read the trace .*cut.gz:\d+: .*ended before"):
        read_trace(tmp_path / "cut.gz")
    with pytest.raises(TraceError, match=r"cannot read the trace .*not.gz: Not a gzipped"):
        read_trace(tmp_path / "not.gz")


def test_bytes_that_are_not_text(trace_file: Path) -> None:
    """A gzipped trace is an error."""
    trace_file.write_bytes(b"\x1f\x8b\x08\x00\xff\n")

    with pytest.raises(TraceError, match=r"trace\.jsonl:1: "):
        read_trace(trace_file)


def test_nothing_to_read(trace_file: Path) -> None:
    """A missing file, a folder and an empty file are errors."""
    with pytest.raises(TraceError, match=r"cannot read the trace .*: No such file"):
        read_trace(trace_file)
    with pytest.raises(TraceError, match=r"cannot read the trace .*: Is a directory"):
        read_trace(trace_file.parent)
    write(trace_file)
    with pytest.raises(TraceError, match="no requests in it"):
        read_trace(trace_file)
