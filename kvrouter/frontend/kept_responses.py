"""Where the responses are that `previous_response_id` may name, and the chats that led to them.

Only the engine that made a response keeps it, so its successor must go there. The chats stay with the replica
that saw them; where a response is, all replicas know for a while (`session_of`).
"""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from msgspec import Struct

from kvrouter.core.routing.policy import Wanted
from kvrouter.core.wire.ids import Target
from kvrouter.tokens.messages import Message

# What each message and each response counts, besides the JSON that brought it.
_MESSAGE_BYTES = 64
# A longer id is not kept: a client may choose it.
MOST_ID_CHARACTERS = 200


class KeptResponse(Struct, frozen=True):
    chat: Sequence[Message] | None
    """Up to and including the response; None if not known."""
    target: Target
    size_bytes: int
    """Of JSON, for the whole chat, though chats share their beginnings: so the sum is a bound."""

    @classmethod
    def elsewhere(cls, target: Target) -> KeptResponse:
        """A response that another replica saw."""
        return cls(None, target, _MESSAGE_BYTES)

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.target.worker_id, self.target.rank)


class NewResponse(Struct, frozen=True):
    """A response in the making."""

    id: str
    chat: Sequence[Message] | None
    size_bytes: int
    """Of its body and of the chat before it."""

    def kept_by(self, target: Target, said: Sequence[Message] | None) -> KeptResponse:
        """What its successors need. `said`: the answer of `target`; None if it was too long to be read."""
        if self.chat is None:
            return KeptResponse(None, target, _MESSAGE_BYTES)
        if said is None:
            # Not text, so overlap ends before it, as before an image.
            said = [{"role": "assistant", "content": [{"type": "response", "id": self.id}]}]
        chat = (*self.chat, *said)
        size_bytes = self.size_bytes + sum(len(message["content"]) for message in said)
        return KeptResponse(chat, target, size_bytes + _MESSAGE_BYTES * len(chat))


class KeptResponses:
    """By id, the least recently used first.

    Invariant: at most `most` responses, with at most `max_bytes` in total.
    """

    def __init__(self, *, most: int = 10_000, max_bytes: int = 64 << 20) -> None:
        self._most = most
        self._max_bytes = max_bytes
        self._kept: dict[str, KeptResponse] = {}
        self.held_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def find(self, response_id: str) -> KeptResponse | None:
        found = self._kept.pop(response_id, None)
        if found is not None:
            self._kept[response_id] = found  # the most recently used
        return found

    def keep(self, new: NewResponse, target: Target, said: Sequence[Message] | None) -> None:
        """Remember a response that was answered; forget others until it has room."""
        replaced = self._kept.pop(new.id, None)
        self._kept[new.id] = kept = new.kept_by(target, said)
        self.held_bytes += kept.size_bytes - (replaced.size_bytes if replaced is not None else 0)
        while len(self._kept) > self._most or self.held_bytes > self._max_bytes:
            self.held_bytes -= self._kept.pop(next(iter(self._kept))).size_bytes


def session_of(response_id: str) -> str:
    """By this session replicas tell each other where a response is. No client's header has a line feed."""
    return f"response\n{response_id}"


def new_response_id() -> str:
    """In the form of vLLM's and OpenAI's own."""
    return f"resp_{uuid.uuid4().hex}"
