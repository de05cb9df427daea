"""`nvext`, the object that NVIDIA Dynamo's clients add to a body. It takes effect here, or is refused.

    backend_instance_id, decode_worker_id, dp_rank   mode direct, to that worker
    agent_hints.priority                             the order in the admission queue; higher goes first
    session_control.session_id                       the session
    cache_salt                                       the body's `cache_salt`

What changes nothing but what an answer tells is ignored: docs/coming-from-dynamo.md has all fields.
Source: NVIDIA Dynamo, "NVIDIA Request Extensions (nvext)".
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec

from kvrouter.errors import BadRequestError

# What would change the answer or the engine's work if it was ignored, and what to do instead.
_REFUSED = {
    "greed_sampling": "send `temperature`: 0",
    "use_raw_prompt": "send the prompt to /v1/completions",
    "token_data": "send the token ids as `prompt` to /v1/completions",
    "max_thinking_tokens": "send the engine's own field, as vLLM's `thinking_token_budget`",
    "prefill_worker_id": "prefill and decode workers are not told apart",
    "prefill_dp_rank": "prefill and decode workers are not told apart",
}
_REFUSED_HINTS = {
    "strict_priority": "the queue has one order: send `agent_hints.priority`",
    "speculative_prefill": "nothing is prefilled before it is asked for",
}

_Priority = Annotated[int, msgspec.Meta(ge=-(2**31) + 1, le=2**31 - 1)]
_WorkerId = int | str


class _Hints(msgspec.Struct):
    priority: _Priority | None = None
    strict_priority: int | None = None
    speculative_prefill: bool | None = None


class _Session(msgspec.Struct):
    session_id: str | None = None
    action: Literal["bind", "open", "close"] | None = None


class Nvext(msgspec.Struct):
    """What is read of it. As in other bodies, null means absent."""

    backend_instance_id: _WorkerId | None = None
    decode_worker_id: _WorkerId | None = None
    dp_rank: Annotated[int, msgspec.Meta(ge=0)] | None = None
    cache_salt: str | None = None
    agent_hints: _Hints | None = None
    session_control: _Session | None = None
    greed_sampling: bool | None = None
    use_raw_prompt: bool | None = None
    token_data: list[int] | None = None
    max_thinking_tokens: int | None = None
    prefill_worker_id: _WorkerId | None = None
    prefill_dp_rank: int | None = None

    @property
    def priority(self) -> int | None:
        """As in vLLM, lower values go first; None if it is not given."""
        given = self.agent_hints.priority if self.agent_hints is not None else None
        return -given if given is not None else None

    def overrides(self) -> dict[str, Any]:
        """The fields of `Overrides` that it sets, by name. Raises BadRequestError for what is refused."""
        self._check()
        found: dict[str, Any] = {}
        worker = self.backend_instance_id if self.decode_worker_id is None else self.decode_worker_id
        if worker is not None:
            rank = f"/{self.dp_rank}" if self.dp_rank is not None else ""
            found |= {"mode": "direct", "target": f"{worker}{rank}"}
        elif self.dp_rank is not None:
            raise _refused("dp_rank", "send `backend_instance_id`, too")
        if self.session_control is not None and self.session_control.session_id is not None:
            found["session"] = self.session_control.session_id
        return found

    def _check(self) -> None:
        one, other = self.backend_instance_id, self.decode_worker_id
        if None not in {one, other} and str(one) != str(other):
            raise _refused("decode_worker_id", "it names another worker than `backend_instance_id`")
        for name, remedy in _REFUSED.items():
            value = getattr(self, name)
            if value is not None and value is not False:
                raise _refused(name, remedy)
        for name, remedy in _REFUSED_HINTS.items():
            if self.agent_hints is not None and getattr(self.agent_hints, name):
                raise _refused(f"agent_hints.{name}", remedy)
        if self.session_control is not None and self.session_control.action in {"open", "close"}:
            raise _refused("session_control.action", 'engines get no session: send "bind"')


def _refused(field: str, remedy: str) -> BadRequestError:
    return BadRequestError(f"`nvext.{field}` is not supported: {remedy}", param=f"nvext.{field}")
