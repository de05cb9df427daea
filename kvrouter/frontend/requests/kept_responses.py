"""Where the responses are that `previous_response_id` may name, and the chats that led to them.

Only the engine that made a response keeps it, so its successor must go there. The chats stay with the replica
that saw them; where a response is, all replicas know for a while (`session_of`).

A response belongs to the client that made it (owners.py). Engines ask for nothing but the id, so a request
that names the response of another client must not reach them:

    resp_ 32 random digits, 16 of a hash of them and the owner    every replica can tell, also after a restart
    any other id, as clients may choose                           as long as replicas remember it
"""

from __future__ import annotations

import re
import uuid
from collections.abc import Callable, Iterator, Sequence
from hashlib import blake2b

from msgspec import Struct

from kvrouter.core.routing.policy import Wanted
from kvrouter.core.wire.ids import Target
from kvrouter.errors import UnknownResponseError
from kvrouter.tokens.messages import Message

# What each message and each response counts, besides the JSON that brought it.
_MESSAGE_BYTES = 64
# A longer id is not kept: a client may choose it.
MOST_ID_CHARACTERS = 200


_TAG_BYTES = 8
_TAGGED = re.compile(r"resp_([0-9a-f]{32})([0-9a-f]{16})")
# As replicas of former versions made them: no one can guess such an id.
_UNTAGGED = re.compile(r"resp_[0-9a-f]{32}")


class KeptResponse(Struct, frozen=True):
    chat: Sequence[Message] | None
    """Up to and including the response; None if not known."""
    target: Target
    size_bytes: int
    """Of JSON, for the whole chat, though chats share their beginnings: so the sum is a bound."""
    owner: str = ""

    @classmethod
    def elsewhere(cls, target: Target, owner: str) -> KeptResponse:
        """A response that another replica saw."""
        return cls(None, target, _MESSAGE_BYTES, owner)

    @property
    def wanted(self) -> Wanted:
        return Wanted(self.target.worker_id, self.target.rank)


class NewResponse(Struct, frozen=True):
    """A response in the making."""

    id: str
    chat: Sequence[Message] | None
    size_bytes: int
    """Of its body and of the chat before it."""
    owner: str = ""

    def sessions(self) -> Iterator[str]:
        """The sessions by which all replicas find its target."""
        yield session_of(self.id, self.owner)
        if self.owner and not _TAGGED.fullmatch(self.id):
            yield _taken(self.id)

    def kept_by(self, target: Target, said: Sequence[Message] | None) -> KeptResponse:
        """What its successors need. `said`: the answer of `target`; None if it was too long to be read."""
        if self.chat is None:
            return KeptResponse(None, target, _MESSAGE_BYTES, self.owner)
        if said is None:
            # Not text, so overlap ends before it, as before an image.
            said = [{"role": "assistant", "content": [{"type": "response", "id": self.id}]}]
        chat = (*self.chat, *said)
        size_bytes = self.size_bytes + sum(len(message["content"]) for message in said)
        return KeptResponse(chat, target, size_bytes + _MESSAGE_BYTES * len(chat), self.owner)


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


def session_of(response_id: str, owner: str = "") -> str:
    """By this session replicas tell each other where a response is. No client's session has a line feed."""
    belongs = owner and not _TAGGED.fullmatch(response_id)
    return f"response\n{owner}\n{response_id}" if belongs else f"response\n{response_id}"


def _taken(response_id: str) -> str:
    """By this one they tell that a chosen id is that of some client's response."""
    return f"taken\n{response_id}"


def find_response(
    response_id: str, owner: str, kept: KeptResponses, target_of: Callable[[str], Target | None]
) -> KeptResponse | None:
    """The response of this client; None: not known. `target_of`: where a session is.

    Raises UnknownResponseError if the response is another client's.
    """
    tagged = _TAGGED.fullmatch(response_id)
    if tagged is not None and tagged[2] != _tag(tagged[1], owner):
        raise UnknownResponseError(response_id)
    found = kept.find(response_id)
    if found is None:
        target = target_of(session_of(response_id, owner))
        if target is None and _UNTAGGED.fullmatch(response_id):
            target = target_of(session_of(response_id))
        found = KeptResponse.elsewhere(target, owner) if target is not None else None
    is_others = found is None and target_of(_taken(response_id)) is not None
    if is_others or (found is not None and found.owner != owner):
        raise UnknownResponseError(response_id)
    return found


def new_response_id(owner: str) -> str:
    """In the form of OpenAI's own."""
    name = uuid.uuid4().hex
    return f"resp_{name}{_tag(name, owner)}"


def _tag(name: str, owner: str) -> str:
    return blake2b(f"{name}\n{owner}".encode(), digest_size=_TAG_BYTES).hexdigest()
