"""Packed bodies."""

from __future__ import annotations

import gzip
import json
import sys
import zlib
from collections.abc import Callable
from random import Random

import brotli
import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import BadRequestError, RequestTooLargeError, UnsupportedCodingError
from kvrouter.relay.codings import codings_of, unpack
from tests.frontend.fleet import BODY, FleetOf
from tests.long import examples

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

MOST = 10_000
CODINGS = {"raw": "deflate"}


def raw_deflate(data: bytes) -> bytes:
    packer = zlib.compressobj(wbits=-15)
    return packer.compress(data) + packer.flush()


PACKINGS: dict[str, Callable[[bytes], bytes]] = {
    "gzip": gzip.compress,
    "x-gzip": gzip.compress,
    "deflate": zlib.compress,
    "raw": raw_deflate,
    "zstd": zstd.compress,
    "br": brotli.compress,
}


@pytest.mark.parametrize("name", PACKINGS)
@given(data=st.binary(max_size=2000))
def test_unpack(name: str, data: bytes) -> None:
    """Each coding, and deflate with and without the header of zlib."""
    assert data == unpack(PACKINGS[name](data), [CODINGS.get(name, name)], MOST)


@given(names=st.lists(st.sampled_from(sorted(PACKINGS)), max_size=3), data=st.binary(max_size=2000))
def test_lists(names: list[str], data: bytes) -> None:
    """The codings come off in the reverse order."""
    packed = data
    for name in names:
        packed = PACKINGS[name](packed)

    assert data == unpack(packed, [CODINGS.get(name, name) for name in names], MOST)


def test_bomb_in_a_bomb() -> None:
    """Each step of a list has the limit."""
    with pytest.raises(RequestTooLargeError):
        unpack(zstd.compress(gzip.compress(bytes(100_000_000))), ["gzip", "zstd"], MOST)
    with pytest.raises(RequestTooLargeError):
        unpack(gzip.compress(bytes(100_000) + gzip.compress(b"x")), ["gzip", "gzip"], MOST)


@pytest.mark.parametrize("name", PACKINGS)
def test_bomb(name: str) -> None:
    """A body that would unpack to more than is allowed is unpacked no further."""
    bomb = PACKINGS[name](bytes(100 * MOST))

    with pytest.raises(RequestTooLargeError, match=f"{MOST} bytes are allowed"):
        unpack(bomb, [CODINGS.get(name, name)], MOST)
    assert MOST == len(unpack(PACKINGS[name](bytes(MOST)), [CODINGS.get(name, name)], MOST))


@pytest.mark.parametrize("coding", ["gzip", "deflate", "zstd", "br"])
@pytest.mark.parametrize(
    "spoil",
    [
        lambda packed: packed[:-3],
        lambda packed: packed + b"x",
        lambda packed: b"\x00" + packed,
        lambda packed: packed[:10] + b"\xff" * 20,
        lambda _: b"{}",
        lambda _: b"",
    ],
    ids=["cut", "longer", "shifted", "spoilt", "not packed", "empty"],
)
def test_not_packed_as_said(coding: str, spoil: Callable[[bytes], bytes]) -> None:
    """What is not exactly one packed body is rejected."""
    with pytest.raises(BadRequestError, match=f"not valid {coding}"):
        unpack(spoil(PACKINGS[coding](b"some text " * 9)), [coding], MOST)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
@examples(100)
@given(parts=st.lists(st.binary(max_size=500), min_size=1, max_size=8), random=st.randoms())
def test_parts(coding: str, parts: list[bytes], random: Random) -> None:
    """A body of several members or frames is all of them, also where one is larger than a slice."""
    parts.insert(random.randrange(len(parts) + 1), random.randbytes(random.choice([1, 65_000, 200_000])))
    packed = b"".join(map(PACKINGS[coding], parts))

    assert b"".join(parts) == unpack(packed, [coding], 1_000_000)
    with pytest.raises(RequestTooLargeError):
        unpack(packed, [coding], sum(map(len, parts)) - 1)
    with pytest.raises(BadRequestError, match="its end is missing"):
        unpack(packed[:-1], [coding], 1_000_000)


@pytest.mark.parametrize("coding", ["gzip", "zstd"])
def test_too_many_parts(coding: str) -> None:
    with pytest.raises(BadRequestError, match="more than 4096 parts"):
        unpack(PACKINGS[coding](b"") * 100_000, [coding], MOST)


@pytest.mark.parametrize("coding", ["deflate", "br"])
def test_coding_without_parts(coding: str) -> None:
    with pytest.raises(BadRequestError, match=f"not valid {coding}"):
        unpack(PACKINGS[coding](b"some text") * 2, [coding], MOST)


@pytest.mark.parametrize(
    ("header", "codings"),
    [
        ("", ()),
        ("identity", ()),
        (" GZIP ", ("gzip",)),
        ("Deflate", ("deflate",)),
        ("gzip, zstd", ("gzip", "zstd")),
        ("identity, br,", ("br",)),
    ],
)
def test_codings(header: str, codings: tuple[str, ...]) -> None:
    assert codings == codings_of(header)


@pytest.mark.parametrize("header", ["compress", "gz ip", "gzip, lzma", "*", "gzip,gzip,gzip,gzip"])
def test_unknown_codings(header: str) -> None:
    with pytest.raises(UnsupportedCodingError, match="use gzip, deflate, br, zstd"):
        codings_of(header)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/route"])
async def test_on_both_listeners(fleet_of: FleetOf, path: str) -> None:
    """A packed body is read, and one that cannot be is a 415 that says what can."""
    body = json.dumps({**BODY, **({"path": "/v1/completions"} if path == "/v1/route" else {})}).encode()
    json_type = "content-type: application/json"
    async with fleet_of() as fleet:
        for coding, packed in (
            ("zstd", zstd.compress(body)),
            ("br", brotli.compress(body)),
            ("gzip, deflate", zlib.compress(gzip.compress(body))),
        ):
            response = await fleet.ask(packed, f"content-encoding: {coding}", json_type, path=path)
            assert 200 == response.status
        assert all(BODY == each.json for worker in fleet.workers for each in worker.requests)
        twice = ("content-encoding: gzip", "content-encoding: br", json_type)
        assert 200 == (await fleet.ask(brotli.compress(gzip.compress(body)), *twice, path=path)).status
        refused = await fleet.ask(body, "content-encoding: compress", json_type, path=path)

        assert (415, "gzip, deflate, br, zstd") == (refused.status, refused.header("accept-encoding"))
        assert "compress" in refused.json["error"]["message"]
