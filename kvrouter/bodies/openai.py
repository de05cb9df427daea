"""OpenAI's request and error bodies.

A request body is parsed once, for the fields that routing needs. The client's own bytes go to the worker, and
the engine checks all other fields (sampling parameters, limits, …).
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from typing import Annotated, Any, Protocol, TypeGuard, TypeVar

import msgspec

from kvrouter.bodies import lax, sglang
from kvrouter.bodies.nvext import Nvext
from kvrouter.core.wire.values import TokenId, valid_unicode
from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.tokens.prompt import ChatPrompt, Prompt, TextPrompt, TokenPrompt

_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
_RawPrompt = str | list[TokenId | str | list[TokenId]]


class CompletionRequest(msgspec.Struct, frozen=True):
    """The fields of a chat or completion request that routing needs."""

    model: str | None
    """None if the client names no model: kvrouter accepts it, as engines do, if it serves one model only."""
    stream: bool
    prompt: Prompt | None
    """None if only the engine knows it (prompt embeddings, a template sent with the request)."""
    cache_salt: str | None
    session_id: str | None
    n: int
    """Number of choices to generate."""
    kvrouter: dict[str, Any] | None = None
    """Overrides for the router (overrides.py). They are removed before the engine gets the body."""
    nvext: Nvext | None = None
    """The same, from Dynamo's clients."""
    echoes: bool = False
    """Whether its answer repeats the prompt."""
    reads_cache: bool = True
    """False for requests for the prompt's logprobs: vLLM then computes the whole prompt, cached or not."""
    is_beam_search: bool = False
    """vLLM runs a beam search as many short requests, and does not report their cached tokens."""
    priority: int = 0
    """As in vLLM, lower values go first."""
    engine_arguments: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    """The raw JSON of vLLM's `vllm_xargs`."""
    removed: tuple[str, ...] = ()
    """The kinds of fields in it that no client may send (lax.py)."""
    best_of: int = 1
    """Of how many it wants the best; vLLM ignores it today."""
    asked_output: int = 0
    """Tokens of output at most, as the client asks; 0: it does not say."""
    extra_key: str | None = None
    """SGLang's `extra_key`: it keeps the blocks of such requests apart from others of equal tokens."""
    may_be_ids: bool = False
    """Whether it is a chat that ids in place of its messages would not change, but for media."""
    token_ids: list[int] | None = None
    """The token ids of the chat, if the client sent them with it."""
    is_odd: bool = False
    """Whether it was read field by field, and so may have fields of lax.STEERS that are not read."""
    remove: Callable[[bytes], bytes] | None = None
    """Removes them from a body that is not JSON; None: it is JSON."""

    @property
    def is_plain(self) -> bool:
        """Whether nothing in its body is for the router, or forbidden: the engine gets it as it is."""
        is_for_engine = self.kvrouter is None and self.nvext is None and not self.removed
        return is_for_engine and self.engine_arguments is msgspec.UNSET


_Body = TypeVar("_Body", bound=msgspec.Struct)
_Request = TypeVar("_Request", bound=CompletionRequest)
_Fields_contra = TypeVar("_Fields_contra", contravariant=True)
_Request_co = TypeVar("_Request_co", bound=CompletionRequest, covariant=True)


class _Common(lax.Guarded):
    """The fields of both kinds of body. As in the engine, null means absent."""

    model: str | None = None
    stream: bool | None = None
    n: int | None = None
    best_of: int | None = None
    max_tokens: int | None = None
    cache_salt: str | None = None
    extra_key: Any = None
    session_id: str | None = None
    add_special_tokens: bool | None = None
    truncate_prompt_tokens: int | None = None
    truncation_side: str | None = None
    kvrouter: dict[str, Any] | None = None
    nvext: Nvext | None = None
    prompt_logprobs: Any = None
    echo: bool | None = None
    use_beam_search: bool | None = None
    priority: _Priority | None = None  # type: ignore[assignment]  # an override, which is read
    vllm_xargs: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET


class _Transfer(msgspec.Struct, forbid_unknown_fields=True):
    """What a client may send of `kv_transfer_params`: nothing else."""

    prompt_token_ids: list[TokenId]


class _ChatBody(_Common):
    kv_transfer_params: _Transfer | None = None  # type: ignore[assignment]  # more than of other bodies
    messages: list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[dict[str, Any]] | None = None
    reasoning_effort: str | None = None
    tool_choice: Any = None
    reasoning: Any = None
    max_completion_tokens: int | None = None
    mm_processor_kwargs: Any = None
    media_io_kwargs: Any = None


class _CompletionBody(_Common):
    prompt: _RawPrompt | None = None
    prompt_embeds: msgspec.Raw | msgspec.UnsetType = msgspec.UNSET
    logprobs: Any = None


# Of an error that a client is sent.
_MOST_MESSAGE_CHARACTERS = 2_000

_CHAT = msgspec.json.Decoder(_ChatBody)
_COMPLETION = msgspec.json.Decoder(_CompletionBody)
FIELDS = lax.names(_ChatBody, _CompletionBody)
TRANSFER = "kv_transfer_params"
# What the prompt does not depend on. If another field cannot be read, the engine makes another prompt of it.
BESIDES_PROMPT = frozenset(
    {
        *("model", "stream", "n", "best_of", "session_id", "priority", "vllm_xargs"),
        *("max_tokens", "max_completion_tokens", "max_output_tokens"),
        *("prompt_logprobs", "echo", "logprobs", "use_beam_search", TRANSFER),
    }
)


def parse_chat(body: bytes) -> CompletionRequest:
    """Parse a /v1/chat/completions body. Raises BadRequestError unless it has `messages`."""
    return read(_CHAT, _ChatBody, body, _of_chat)


def _of_chat(chat: _ChatBody, *, is_doubtful: bool) -> CompletionRequest:
    if is_doubtful:
        return _request(chat, None, chat.max_completion_tokens)
    if chat.messages is None:
        raise BadRequestError("`messages` must be given, as a list of messages", param="messages")
    prompt = _chat_prompt(chat, chat.messages) if chat.messages else None  # empty: the engine judges
    may_be_ids = prompt is not None and chat.truncate_prompt_tokens is None and not chat.echo
    ids = chat.kv_transfer_params.prompt_token_ids if chat.kv_transfer_params is not None else None
    return _request(chat, prompt, chat.max_completion_tokens, may_be_ids=may_be_ids, token_ids=ids)


def parse_completion(body: bytes) -> CompletionRequest:
    """Parse a /v1/completions body. Raises BadRequestError unless it has a prompt."""
    return read(_COMPLETION, _CompletionBody, body, _of_completion)


def _of_completion(completion: _CompletionBody, *, is_doubtful: bool) -> CompletionRequest:
    if is_doubtful or (not completion.prompt and completion.prompt_embeds is not msgspec.UNSET):
        return _request(completion, None)
    if completion.prompt is None:
        raise BadRequestError("`prompt` must be given", param="prompt")
    return _request(completion, _completion_prompt(completion))


class _Build(Protocol[_Fields_contra, _Request_co]):
    def __call__(self, fields: _Fields_contra, /, *, is_doubtful: bool) -> _Request_co:
        """Make a request of the fields. `is_doubtful`: what its prompt depends on is not known."""
        ...


def read(
    decoder: msgspec.json.Decoder[_Body],
    kind: type[_Body],
    body: bytes,
    build: _Build[_Body, _Request],
) -> _Request:
    """Read a body with the fast decoder, else field by field. Raises BadRequestError."""
    try:
        fields = None if lax.is_suspicious(body) else decoder.decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        fields = None
    if fields is not None:
        return build(fields, is_doubtful=False)
    found = lax.read(kind, body)
    request = build(found.body, is_doubtful=found.shapes_prompt(BESIDES_PROMPT))
    kept = {TRANSFER} if request.token_ids is not None else set()
    return msgspec.structs.replace(request, removed=tuple(sorted({*found.removed} - kept)), is_odd=True)


def error_message(error: KvRouterError) -> str:
    """Its text, in valid Unicode; what a client sent is not sent back at full length."""
    text = valid_unicode(str(error))
    return text if len(text) <= _MOST_MESSAGE_CHARACTERS else text[:_MOST_MESSAGE_CHARACTERS] + "…"


def error_details(error: KvRouterError) -> dict[str, Any]:
    """OpenAI's error object."""
    return {
        "message": error_message(error),
        "type": error.type,
        "param": getattr(error, "param", None),
        "code": error.code or error.status,
    }


def error_body(error: KvRouterError, _request_id: str = "") -> bytes:
    """The JSON that OpenAI clients expect with a status of 400 and above."""
    return msgspec.json.encode({"error": error_details(error)})


def error_event(error: KvRouterError) -> bytes:
    """The same as a server-sent event, for a stream whose status was sent already."""
    return b"data: " + error_body(error) + b"\n\n"


def _request(
    body: _Common,
    prompt: Prompt | None,
    asked_output: int | None = None,
    *,
    may_be_ids: bool = False,
    token_ids: list[int] | None = None,
) -> CompletionRequest:
    # by position: CPython passes more than 15 keywords by a dict, which takes 1 % of a request
    return CompletionRequest(
        body.model,
        bool(body.stream),
        prompt,
        salt_of(body.cache_salt, body.nvext),
        body.session_id or None,
        max(1, body.n or 1),
        best_of=body.best_of or 1,
        kvrouter=body.kvrouter,
        nvext=body.nvext,
        echoes=bool(body.echo),
        reads_cache=body.prompt_logprobs is None and not _echoes_logprobs(body),
        is_beam_search=bool(body.use_beam_search),
        priority=priority_of(body.priority, body.nvext),
        engine_arguments=body.vllm_xargs,
        asked_output=max(0, asked_output or body.max_tokens or 0),
        extra_key=str(body.extra_key) if body.extra_key else None,
        may_be_ids=may_be_ids,
        token_ids=token_ids,
    )


def salt_of(own: str | None, nvext: Nvext | None) -> str | None:
    """The salt of the body, or of its `nvext`."""
    return own or (nvext.cache_salt if nvext is not None else None) or None


def priority_of(own: int | None, nvext: Nvext | None) -> int:
    """The priority of the body, or of its `nvext`: lower values go first."""
    if own is None and nvext is not None:
        own = nvext.priority
    return own or 0


def _echoes_logprobs(body: _Common) -> bool:
    """Whether the prompt's logprobs are returned. vLLM returns them for each chat with `echo`."""
    if not body.echo:
        return False
    return not isinstance(body, _CompletionBody) or body.logprobs is not None


def _chat_prompt(chat: _ChatBody, messages: list[dict[str, Any]]) -> ChatPrompt | None:
    if chat.chat_template is not None:
        return None  # only the engine may trust a client's template: a template is a program
    return ChatPrompt(
        messages=messages,
        tools=chat.tools or None,
        add_generation_prompt=chat.add_generation_prompt is not False,  # true by default, as in engines
        continue_final_message=bool(chat.continue_final_message),
        chat_template_kwargs=_template_variables(chat),
        effort=chat.reasoning_effort,
        tool_choice=chat.tool_choice,
        add_special_tokens=bool(chat.add_special_tokens),  # off by default: templates print their own
        kept_tokens=_kept_tokens(chat),
        has_media_options=bool(chat.mm_processor_kwargs or chat.media_io_kwargs),
        for_sglang=sglang.Later(_for_sglang, (chat, messages)),
    )


def _for_sglang(chat: _ChatBody, messages: list[dict[str, Any]]) -> ChatPrompt:
    return sglang.chat(
        messages,
        tools=chat.tools,
        choice=chat.tool_choice,
        variables=chat.chat_template_kwargs,
        effort=chat.reasoning_effort,
        reasoning=chat.reasoning,
        is_continued=bool(chat.continue_final_message),
    )


def _template_variables(chat: _ChatBody) -> dict[str, Any]:
    """`chat_template_kwargs`, and the documents, which vLLM, too, hands to the template."""
    variables = dict(chat.chat_template_kwargs or {})
    if chat.documents is not None:
        variables["documents"] = chat.documents
    return variables


def _completion_prompt(body: _CompletionBody) -> TextPrompt | TokenPrompt | None:
    """None if there is none, or a list that is empty or mixed: the engine judges it."""
    prompt, kept = body.prompt, _kept_tokens(body)
    if not prompt:
        return None
    if isinstance(prompt, str):
        return TextPrompt([prompt], body.add_special_tokens is not False, kept)
    if _is_token_ids(prompt):
        return TokenPrompt([prompt], kept)
    if _is_list_of_lists(prompt) and all(prompt):
        return TokenPrompt(prompt, kept)
    if _is_list_of_strings(prompt):
        return TextPrompt(prompt, body.add_special_tokens is not False, kept)
    return None


def _is_token_ids(prompt: list[Any]) -> TypeGuard[list[int]]:
    try:
        array("I", prompt)  # checks 9,000 elements in 50 µs; testing their types takes 150 µs
    except TypeError:
        return False
    return True


def _is_list_of_lists(prompt: list[Any]) -> TypeGuard[list[list[int]]]:
    return all(isinstance(item, list) for item in prompt)


def _is_list_of_strings(prompt: list[Any]) -> TypeGuard[list[str]]:
    return all(isinstance(item, str) for item in prompt)


def _kept_tokens(body: _Common) -> slice | None:
    """The part that `truncate_prompt_tokens` keeps: the end, unless `truncation_side` is right."""
    count = body.truncate_prompt_tokens
    if count is None or count < 1:
        return None  # -1 is the model's own limit, which only its engine knows
    return slice(count) if body.truncation_side == "right" else slice(-count, None)
