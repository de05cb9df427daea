"""The saved state of an agent: its bytes, its file, and damage to both."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import msgpack
import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from structlog.testing import capture_logs

from kvrouter.worker.blocks.engine_blocks import BlocksImage, EngineBlocks
from kvrouter.worker.blocks.state import (
    MAGIC,
    ROWS_PER_RECORD,
    VERSION,
    AgentState,
    DamagedStateError,
    ForeignStateError,
    Header,
    RankHead,
    RankState,
    StateFile,
    decode_state,
    digest_of_file,
    encode_state,
    replace_file,
)

OWNER = "ns/w"
HEAD = RankHead(0, 7, b"d" * 16, True, True, False, False, 3, None, 100.5, 2)


def table() -> BlocksImage:
    """A table with entries of every kind."""
    blocks = EngineBlocks()
    blocks.stored([1, b"\xff" * 32], [1, 2, 3, 4], block_size=2, lora_name="a", salt="s")
    blocks.stored([1], [], block_size=2, tier=1)
    blocks.stored([2**64 - 1, 4], [5, 6, 7, 8], block_size=2, ids=[(5, 6), None])
    blocks.stored([5, 6], [9, 10, 11, 12], block_size=2, parent=77, ids=[(1,), None])
    blocks.stored(range(100, 100 + ROWS_PER_RECORD), range(2 * ROWS_PER_RECORD), block_size=2)
    blocks.group_stored(1, 2, [1, b"\xff" * 32, 1], is_root=True)
    blocks.group_stored(2, 0, [], is_root=True)
    return blocks.image()


def state_of(*heads: RankHead, owner: str = OWNER, version: int = VERSION) -> AgentState:
    """A state with the same table for each rank."""
    ranks = {head.rank: RankState(head, table()) for head in heads}
    return AgentState(Header(version, owner, 10.0, 5), ranks)


def bytes_of(state: AgentState) -> bytes:
    """The bytes of the whole file."""
    pieces = list(encode_state(state))
    return b"".join([*pieces, digest_of_file(pieces)])


def test_streaming_reader_finds_every_record() -> None:
    """Msgpack's Unpacker, which knows no shape, reads the records between their lengths."""
    _, *pieces = encode_state(state_of(HEAD))
    unpacker = msgpack.Unpacker(strict_map_key=False)
    for piece in pieces:
        unpacker.feed(piece[4:])
    header, head, *rows = unpacker

    assert [0, VERSION, OWNER, 10.0, 5] == header
    assert [1, *msgspec.to_builtins(HEAD, builtin_types=(bytes,))[1:]] == head
    known = [row for record in rows if record[0] == 2 for row in record[1]]
    assert [*table().known] == [name for name, _ in known]


STATE = state_of(HEAD, msgspec.structs.replace(HEAD, rank=1, group=2, first_ts=None))
DATA = bytes_of(STATE)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The path of the file."""
    return tmp_path / "state"


@pytest.fixture
def file(path: Path) -> Iterator[StateFile]:
    """The file of agent w."""
    with StateFile.open(path, OWNER) as file:
        yield file


def look(path: Path) -> os.stat_result:
    """Inode and modification time of a file."""
    return path.stat()


def put(path: Path, data: bytes) -> None:
    """Write a file to that path."""
    path.write_bytes(data)


def test_round_trip() -> None:
    """A state that is written is read back equal."""
    assert STATE == decode_state(DATA, OWNER)


def test_pieces_are_small() -> None:
    """A record has at most a thousand rows, so other tasks run after each."""
    pieces = list(encode_state(STATE))

    assert 1 + 1 + 2 * (1 + 2 + 1 + 3) == len(pieces)


@given(st.integers(0, len(DATA) - 1))
def test_cut_off(length: int) -> None:
    """A part of a file is rejected."""
    with pytest.raises(DamagedStateError):
        decode_state(DATA[:length], OWNER)


@given(st.integers(len(MAGIC), len(DATA) - 1), st.integers(1, 255))
def test_flipped(position: int, change: int) -> None:
    """A file with any wrong byte is rejected."""
    data = bytearray(DATA)
    data[position] ^= change

    with pytest.raises(DamagedStateError):
        decode_state(bytes(data), OWNER)


@pytest.mark.parametrize(
    "data",
    [
        bytes_of(state_of(HEAD, version=VERSION + 1)),
        MAGIC + digest_of_file([MAGIC]),
        *(
            MAGIC + body + digest_of_file([MAGIC, body])
            for body in (b"\x02\0\0\0\x91\x63", b"\x01\0\0\0\xc1", b"\xff")
        ),
    ],
)
def test_unusable(data: bytes) -> None:
    """Another version, an empty file and unknown records are rejected, although the digest is right."""
    with pytest.raises(DamagedStateError):
        decode_state(data, OWNER)


def test_two_headers() -> None:
    """A file with two headers is rejected."""
    _, head, *_ = encode_state(STATE)
    body = [MAGIC, head, head]

    with pytest.raises(DamagedStateError, match="two headers"):
        decode_state(b"".join([*body, digest_of_file(body)]), OWNER)


@pytest.mark.parametrize("data", [b"# a file of mine\n", bytes_of(state_of(owner="ns/other"))])
def test_foreign(data: bytes) -> None:
    """A file that is not a state, or belongs to another agent, is not called damaged."""
    with pytest.raises(ForeignStateError):
        decode_state(data, OWNER)


def test_restore() -> None:
    """A restored table publishes the same blocks as before, and continues in the same way."""
    before, after = EngineBlocks(), EngineBlocks()
    before.restore(table())
    after.restore(decode_state(DATA, OWNER).ranks[0].image)
    after.check()

    assert before.state_ops() == after.state_ops()
    assert before.check_ops() == after.check_ops()
    for step in ("stored", "removed"):
        if step == "stored":
            happened = [table.stored([77], [0, 0], block_size=2) for table in (before, after)]
        else:
            happened = [table.removed([1, b"\xff" * 32, 5]) for table in (before, after)]
        assert happened[0] == happened[1] != []
    assert 0 == after.held_blocks


def test_image_stays() -> None:
    """Later changes of the table do not change its image."""
    blocks = EngineBlocks()
    blocks.stored([1, 2], [1, 2], block_size=1)
    image = blocks.image()
    blocks.stored([1], [1], block_size=1)
    blocks.removed([2])
    blocks.stored([8], [1], block_size=1, parent=7)

    assert ([1, 2], {}) == (list(image.known), image.held)
    assert [(1, 0, 0)] * 2 == [known.refs for known in image.known.values()]


async def test_save_and_load(file: StateFile, path: Path) -> None:
    """A saved state is read back. Only its owner may read the file: it can contain prompts."""
    await file.save(STATE)

    assert STATE == file.read()
    assert 0o600 == stat.S_IMODE(look(path).st_mode)
    assert [path] == list(path.parent.iterdir())


async def test_unchanged(file: StateFile, path: Path) -> None:
    """Without changes nothing is written."""
    await file.save(STATE)
    written = look(path).st_ino
    await file.save(STATE)
    assert written == look(path).st_ino

    await file.save(state_of(HEAD))
    assert state_of(HEAD) == file.read()


def test_none(file: StateFile) -> None:
    """Without a file there is no state."""
    assert file.read() is None


async def test_half_written(file: StateFile, path: Path) -> None:
    """Killed while writing: the former file is complete, and the unfinished one is replaced."""
    await file.save(STATE)
    path.with_name("state.new").write_bytes(DATA[: len(DATA) // 2])

    assert STATE == file.read()
    await file.save(state_of(HEAD))
    assert [path] == list(path.parent.iterdir())


@pytest.mark.parametrize("size", [0, 10, len(DATA) // 2])
async def test_damaged(file: StateFile, path: Path, size: int) -> None:
    """Half a file is rejected with a log entry, and replaced by the next save."""
    put(path, DATA[:size])
    with capture_logs() as logs:
        assert file.read() is None
    await file.save(STATE)

    assert [("state.damaged", "warning")] == [(entry["event"], entry["log_level"]) for entry in logs]
    assert STATE == file.read()


async def test_foreign_file_stays(file: StateFile, path: Path) -> None:
    """The file of another agent is neither used nor changed."""
    put(path, b"mine")
    with capture_logs() as logs:
        assert file.read() is None
    await file.save(STATE)

    assert ["state.rejected"] == [entry["event"] for entry in logs]
    assert len(b"mine") == look(path).st_size


async def test_cannot_be_written(tmp_path: Path) -> None:
    """If the file cannot be written the agent continues; the error is logged once."""
    with StateFile.open(tmp_path / "gone" / "state", OWNER) as file, capture_logs() as logs:
        await file.save(STATE)
        await file.save(STATE)

    assert ["state.not_written"] == [entry["event"] for entry in logs]


def test_replace_file_fails(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk leaves the former file unchanged."""
    replace_file(path, [b"before"])
    monkeypatch.setattr("os.fsync", _full)

    with pytest.raises(OSError, match="full"):
        replace_file(path, [b"after"])

    assert path.read_bytes().startswith(b"before")


def _full(descriptor: int) -> None:
    raise OSError("the disk is full")


def test_ranks_are_separate() -> None:
    """Each rank has a separate table."""
    other = RankState(msgspec.structs.replace(HEAD, rank=1), BlocksImage({}, {}))
    state = replace(STATE, ranks={0: STATE.ranks[0], 1: other})

    assert state == decode_state(bytes_of(state), OWNER)
