"""Answers that the router writes itself."""

from __future__ import annotations

from kvrouter.relay.answer import rejected_answer
from kvrouter.relay.outcomes import Rejected


def test_rejection_is_passed_on_byte_for_byte() -> None:
    """A worker's headers pass in any encoding."""
    rejected = Rejected(429, "text/plain; x=é".encode() + b"\xe9", ((b"retry-after", b"7 \xc3\xa9"),), b"no")

    answer = rejected_answer("r", rejected).encode(keeps_alive=True)

    assert b"\r\ncontent-type: text/plain; x=\xc3\xa9\xe9\r\n" in answer
    assert b"\r\nretry-after: 7 \xc3\xa9\r\n" in answer
    assert answer.endswith(b"\r\n\r\nno")
