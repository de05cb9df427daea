"""Answers of our own, as bytes."""

from __future__ import annotations

from kvrouter.relay.answer import rejected_answer
from kvrouter.relay.exchange import Rejected


def test_a_workers_refusal_is_passed_on_byte_for_byte() -> None:
    """Whatever a worker's headers are written in."""
    refusal = Rejected(429, "text/plain; x=é".encode() + b"\xe9", b"7 \xc3\xa9", b"no")

    said = rejected_answer("r", refusal).encode(keeps_alive=True)

    assert b"\r\ncontent-type: text/plain; x=\xc3\xa9\xe9\r\n" in said
    assert b"\r\nretry-after: 7 \xc3\xa9\r\n" in said
    assert said.endswith(b"\r\n\r\nno")
