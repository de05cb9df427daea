"""Request bodies as vLLM reads them, and its errors for invalid ones.

Unknown fields are ignored; a missing `model` means the base model. Sampling is not simulated, so temperature,
stop strings and the like are accepted and have no effect, all answers to a prompt (`n`) are the same, and
every logprob is 0. Tools are called if `tool_choice` demands it. Their arguments, and answers for which a
JSON schema is given, fit that (fitting.py).
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from kvrouter.errors import BadRequestError, KvRouterError
from kvrouter.lab.mocker.fitting import fitting
from kvrouter.lab.mocker.hashing import EnginePrompt, token_ids

# `max_tokens` of /v1/completions in OpenAI's and vLLM's API.
DEFAULT_COMPLETION_TOKENS = 16
# `n` of one request.
MOST_ANSWERS = 128
# Of a chat with `reasoning_effort`, or with what stands for it in other APIs, before its answer.
REASONING_TOKENS = 4


class SchemaError(BadRequestError):
    """The body is not JSON, or has the wrong shape. vLLM gives this error a different type."""

    type = "Bad Request"


class EngineBusyError(KvRouterError):
    """`max_num_queued_reqs` is reached."""

    status = 503
    type = "Service Unavailable"

    def __init__(self) -> None:
        super().__init__(
            "The engine is currently busy and cannot accept new requests. "
            "Please try again later or on a different instance."
        )


class StreamOptions(msgspec.Struct, frozen=True):
    """`stream_options`."""

    include_usage: bool = False
    continuous_usage_stats: bool = False


class Body(msgspec.Struct, frozen=True, kw_only=True):
    """The fields that both kinds of completion share."""

    model: str | None = None
    n: int | None = 1
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: int | None = None
    ignore_eos: bool = False
    cache_salt: str | None = None
    return_token_ids: bool | None = None
    vllm_xargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    logprobs: Any = None
    # Only a mocker with a connector reads it, except for a chat's token ids.
    kv_transfer_params: Any = None
    # SGLang's.
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    disagg_prefill_dp_rank: Any = None

    @property
    def answers(self) -> int:
        """Choices for each prompt."""
        return self.n or 1

    @property
    def shows_logprobs(self) -> bool:
        """Whether the answer has the logprobs of its tokens. They are all 0: nothing is sampled."""
        return self.logprobs not in (None, False)

    @property
    def demanded_tool(self) -> str | None:
        """The name of the function that must be called: of `tool_choice`, or the first one."""
        choice, tools = self.tool_choice, self.tools or [{}]
        if choice == "required" or (isinstance(choice, dict) and choice.get("type") == "any"):
            choice = tools[0]
        if not isinstance(choice, dict) or choice.get("type") in {"auto", "none"}:
            return None
        name = (choice.get("function") or choice).get("name")
        return name if isinstance(name, str) else None

    @property
    def arguments(self) -> str:
        """What the demanded tool is called with: a JSON object."""
        named = [tool.get("function") or tool for tool in self.tools or ()]
        for tool in [one for one in named if isinstance(one, dict) and one.get("name") == self.demanded_tool]:
            schema = tool.get("parameters") or tool.get("input_schema")
            found = fitting(schema) if isinstance(schema, dict) else ""
            return found if found.startswith("{") else "{}"
        return "{}"

    @property
    def schema(self) -> object:
        """The JSON schema that the answer has to fit; None: there is none."""
        given = self.structured_outputs
        if isinstance(given, dict) and given.get("json") is not None:
            return given["json"]
        return _schema_of(self.response_format)

    @property
    def reasoning_tokens(self) -> int:
        """Tokens of reasoning before the answer: a demanded call needs none."""
        return REASONING_TOKENS if self.thinks and self.demanded_tool is None else 0

    @property
    def thinks(self) -> bool:
        """Whether reasoning was asked for."""
        return False

    @property
    def answer_tokens(self) -> int | None:
        """The client's limit for the answer; None: no limit."""
        return self.max_tokens


def _schema_of(form: object) -> object:
    """Of `response_format`, or of `text.format` of a response."""
    if not isinstance(form, dict) or form.get("type") not in ("json_object", "json_schema"):
        return None
    given = form.get("json_schema") or form
    return (given.get("schema") if isinstance(given, dict) else None) or {"type": "object"}


class CompletionBody(Body, frozen=True, kw_only=True):
    """/v1/completions."""

    prompt: Any = None
    max_tokens: int | None = DEFAULT_COMPLETION_TOKENS
    add_special_tokens: bool = True


class Transfer(msgspec.Struct, frozen=True, kw_only=True):
    """`kv_transfer_params`: what routers and hand-over partners tell an engine."""

    prompt_token_ids: list[int] | None = None
    do_remote_decode: Any = None
    do_remote_prefill: Any = None
    remote_block_ids: Any = None
    remote_engine_id: Any = None
    remote_request_id: Any = None
    remote_host: Any = None
    remote_port: Any = None
    remote_prefill_cached_tokens: Any = None
    transfer_id: Any = None
    remote_bootstrap_addr: Any = None
    remote_kv_source: Any = None
    bootstrap_host: Any = None
    bootstrap_port: Any = None
    bootstrap_room: Any = None
    disagg_prefill_dp_rank: Any = None

    @property
    def peer(self) -> str:
        """HOST:PORT of the peer from which blocks are read; empty if it is not named whole."""
        named = self.remote_kv_source if isinstance(self.remote_kv_source, dict) else {}
        host, port = named.get("remote_host"), named.get("remote_port")
        if not (host and port and named.get("kv_request_id")):
            return ""
        return f"[{host}]:{port}" if ":" in str(host) else f"{host}:{port}"

    @property
    def is_complete(self) -> bool:
        """Whether the decode engine can fetch: it prefills itself without one of these (vLLM 0.32)."""
        where = (self.remote_engine_id, self.remote_request_id, self.remote_host, self.remote_port)
        with_nixl = bool(self.remote_block_ids) and all(where)
        return with_nixl or all((self.remote_engine_id, self.transfer_id, self.remote_bootstrap_addr))


class ChatBody(Body, frozen=True, kw_only=True):
    """/v1/chat/completions."""

    messages: list[dict[str, Any]]
    kv_transfer_params: Transfer | None = None
    max_completion_tokens: int | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None

    @property
    def thinks(self) -> bool:
        return self.reasoning_effort not in {None, "none"}

    @property
    def answer_tokens(self) -> int | None:
        """The client's limit for the answer. The newer name has priority, as in vLLM."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens


class MessagesBody(Body, frozen=True, kw_only=True):
    """/v1/messages. What its prompt is made of, kvrouter.bodies.messages reads."""

    max_tokens: int
    thinking: Any = None

    @property
    def thinks(self) -> bool:
        return isinstance(self.thinking, dict) and self.thinking.get("type") in {"enabled", "adaptive"}


class ResponsesBody(Body, frozen=True, kw_only=True):
    """/v1/responses. What its prompt is made of, kvrouter.bodies.responses reads."""

    max_output_tokens: int | None = None
    previous_response_id: str | None = None
    request_id: str | None = None
    store: bool | None = True
    include: list[str] | None = None
    text: Any = None
    reasoning: Any = None

    @property
    def thinks(self) -> bool:
        effort = self.reasoning.get("effort") if isinstance(self.reasoning, dict) else None
        return effort not in {None, "none"}

    @property
    def schema(self) -> object:
        return _schema_of(self.text.get("format")) if isinstance(self.text, dict) else None

    @property
    def answer_tokens(self) -> int | None:
        return self.max_output_tokens

    @property
    def shows_logprobs(self) -> bool:
        return "message.output_text.logprobs" in (self.include or ())


class EmbeddingBody(msgspec.Struct, frozen=True, kw_only=True):
    """/v1/embeddings."""

    model: str | None = None
    input: Any
    encoding_format: Literal["float", "base64"] = "float"
    dimensions: Annotated[int, msgspec.Meta(ge=1, le=8192)] | None = None


class SpeedBody(msgspec.Struct, frozen=True):
    """/speed: another speed, relative to an H100 with an 8B model."""

    speedup: Annotated[float, msgspec.Meta(gt=0, le=1e6)]


class TokenizeBody(msgspec.Struct, frozen=True, kw_only=True):
    """/tokenize: a prompt or a chat."""

    model: str | None = None
    prompt: str | None = None
    messages: list[dict[str, Any]] | None = None
    add_special_tokens: bool | None = None
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None


BodyT = TypeVar("BodyT", CompletionBody, ChatBody, MessagesBody, ResponsesBody, TokenizeBody, EmbeddingBody)
AnyBody = TypeVar("AnyBody")


def parse(kind: type[AnyBody], raw: bytes) -> AnyBody:
    """Decode and check a body."""
    try:
        body = msgspec.json.decode(raw, type=kind, strict=True)
    except msgspec.ValidationError as error:
        raise SchemaError(f"1 validation error:\n  {error}", param=_field(str(error))) from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise SchemaError(f"1 validation error:\n  JSON decode error: {error}", param="body") from error
    if isinstance(body, Body):
        _check(body)
    return body


def _check(body: Body) -> None:
    if body.stream_options is not None and not body.stream:
        raise SchemaError("Stream options can only be defined when `stream=True`.", param="stream_options")
    if body.cache_salt == "":
        raise SchemaError("cache_salt must be a non-empty string if provided", param="cache_salt")
    if not 1 <= body.answers <= MOST_ANSWERS:
        raise BadRequestError(f"n must be between 1 and {MOST_ANSWERS}, got {body.n}.", param="n")
    limit = body.answer_tokens
    if limit is not None and limit < 1:
        raise BadRequestError(f"max_tokens must be at least 1, got {limit}.", param="max_tokens")


def _field(message: str) -> str:
    """The field in a msgspec error, as vLLM names it: `body.messages`."""
    found = re.search(r"field `(\w+)`", message) or re.search(r"`\$\.(\w+)", message)
    return f"body.{found[1]}" if found else "body"


def transfer_of(body: Body) -> Transfer:
    """What the body says about a hand-over. Nothing of it is checked here, as in vLLM."""
    params = body.kv_transfer_params
    if body.bootstrap_room is not None:
        names = ("bootstrap_host", "bootstrap_port", "bootstrap_room", "disagg_prefill_dp_rank")
        return Transfer(**{name: getattr(body, name) for name in names})
    if isinstance(params, dict):
        return msgspec.convert(params | {"prompt_token_ids": None}, Transfer)
    return params if isinstance(params, Transfer) else Transfer()


def token_prompts(prompt: object) -> list[EnginePrompt] | None:
    """The prompts of a completion given as token ids, `[int]` or `[[int]]`; None if they are text."""
    if not isinstance(prompt, list) or not prompt or isinstance(prompt[0], str):
        return None
    prompts = prompt if isinstance(prompt[0], list) else [prompt]
    try:
        return [EnginePrompt(token_ids(ids)) for ids in prompts]
    except (TypeError, OverflowError) as error:
        raise SchemaError(f"1 validation error:\n  prompt: {error}", param="body.prompt") from error


def text_prompts(prompt: object) -> list[str]:
    """The prompts of a completion given as text, `str` or `[str]`."""
    prompts = [prompt] if isinstance(prompt, str) else prompt
    if not isinstance(prompts, list) or not prompts or "" in prompts:
        raise SchemaError(
            "Either prompt or prompt_embeds must be provided and non-empty.", param="body.prompt"
        )
    if not all(isinstance(text, str) for text in prompts):
        raise SchemaError("1 validation error:\n  prompt: mixed types", param="body.prompt")
    return prompts
