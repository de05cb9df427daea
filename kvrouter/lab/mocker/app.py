"""vLLM's HTTP surface over the engines of one mocker."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import nullcontext

from aiohttp import web
from aiohttp.typedefs import Handler

from kvrouter.bodies import messages, openai, responses
from kvrouter.bodies.openai import CompletionRequest
from kvrouter.errors import BadRequestError, KvRouterError, UnknownModelError, UnknownResponseError
from kvrouter.lab.mocker.bodies import (
    Body,
    BodyT,
    ChatBody,
    CompletionBody,
    EmbeddingBody,
    EngineBusyError,
    MessagesBody,
    ResponsesBody,
    SchemaError,
    SpeedBody,
    StreamOptions,
    TokenizeBody,
    parse,
    text_prompts,
    token_prompts,
    transfer_of,
)
from kvrouter.lab.mocker.config import MockerConfig
from kvrouter.lab.mocker.engine import Engine, EngineRequest
from kvrouter.lab.mocker.fitting import DIMENSIONS, MOST_NUMBERS, pieces_of
from kvrouter.lab.mocker.handover import Handover, LoadFailedError
from kvrouter.lab.mocker.hashing import EnginePrompt
from kvrouter.lab.mocker.messages_reply import MessagesReply
from kvrouter.lab.mocker.publisher import PUB_HIGH_WATER_MARK
from kvrouter.lab.mocker.rank import Rank
from kvrouter.lab.mocker.replies import (
    DONE,
    ChatReply,
    Choice,
    CompletionReply,
    Json,
    Reply,
    ReplyRun,
    embedded,
    encode,
)
from kvrouter.lab.mocker.responses_reply import ResponsesReply
from kvrouter.lab.mocker.rooms import TransferFailedError
from kvrouter.lab.mocker.text import Text
from kvrouter.tokens.messages import Message
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt, has_media

# A prompt of a million token ids is 7 MB of JSON.
MAX_BODY_BYTES = 64 << 20

# The vLLM whose interface this is.
VERSION = "0.32.0"

# Of KV cache: 32 layers, 8 KV heads of 128, bf16, as the times of the engine have it.
TOKEN_BYTES = 128 << 10

# Its errors have another form.
_ANTHROPIC = "/v1/messages"

# Responses that `previous_response_id` may name; the oldest are dropped.
MOST_RESPONSES = 1000

_SSE_HEADERS = {"Content-Type": "text/event-stream; charset=utf-8"}


class MockService:
    """The HTTP handlers, and the state that they share."""

    def __init__(self, config: MockerConfig, text: Text, ranks: Sequence[Rank]) -> None:
        self.config = config
        self.text = text
        self.ranks = ranks
        self.started_at_s = time.time()
        self.rejections = 0
        self.handover = Handover(config, ranks) if config.kv_connector is not None else None
        self._numbers = itertools.count()
        self._responses: dict[str, list[Message]] = {}

    # --- completions ---

    async def completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/completions."""
        body = await self._read(http, CompletionBody)
        prompts = token_prompts(body.prompt)
        if prompts is None:
            texts = text_prompts(body.prompt)
            prompts = await self.text.encode(TextPrompt(texts, add_special_tokens=body.add_special_tokens))
        return await self._answer(http, body, prompts, CompletionReply, "cmpl-")

    async def chat_completions(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/chat/completions."""
        body = await self._read(http, ChatBody)
        prompts = _ids_sent(body) or await self.text.encode(_chat_prompt(body, body.reasoning_effort))
        return await self._answer(http, body, prompts, ChatReply, "chatcmpl-")

    async def messages(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/messages."""
        body = await self._read(http, MessagesBody)
        prompts = await self._converted(messages.parse(await http.read()))
        return await self._answer(http, body, prompts, MessagesReply, "chatcmpl-")

    async def count_tokens(self, http: web.Request) -> web.Response:
        """POST /v1/messages/count_tokens."""
        (prompt,) = await self._converted(messages.parse(await http.read()))
        return _json({"input_tokens": len(prompt.tokens)})

    async def responses(self, http: web.Request) -> web.StreamResponse:
        """POST /v1/responses."""
        body = await self._read(http, ResponsesBody)
        history = None
        if body.previous_response_id is not None:
            history = self._responses.get(body.previous_response_id)
            if history is None:
                raise UnknownResponseError(body.previous_response_id)
        asked = responses.parse(await http.read(), history)
        prompts = await self._converted(asked)
        number = body.request_id or f"resp_{secrets.token_hex(16)}"

        def keep(choice: Choice) -> None:
            assert isinstance(asked.prompt, ChatPrompt)
            said = {"role": "assistant", "content": "".join(choice.texts[body.reasoning_tokens :])}
            # a call is not part of the history, as in vLLM
            self._responses[number] = [*asked.prompt.messages, *([] if body.demanded_tool else [said])]
            if len(self._responses) > MOST_RESPONSES:
                del self._responses[next(iter(self._responses))]

        kept = keep if body.store is not False else None
        return await self._answer(http, body, prompts, ResponsesReply, "", answer_id=number, keep=kept)

    async def _converted(self, asked: CompletionRequest) -> list[EnginePrompt]:
        """The tokens of a body that was converted to a chat."""
        if asked.prompt is None:
            raise SchemaError("1 validation error:\n  the body cannot be converted to a chat")
        return await self.text.encode(asked.prompt)

    async def _answer(
        self,
        http: web.Request,
        body: Body,
        prompts: list[EnginePrompt],
        shape: type[Reply],
        prefix: str,
        *,
        answer_id: str = "",
        keep: Callable[[Choice], None] | None = None,
    ) -> web.StreamResponse:
        """Run the prompts on one rank and write the answer, streamed or whole.

        `answer_id`; empty: made of `prefix` and the request's. `keep` gets the answer in the end.
        """
        self._check_lengths(prompts, body.answer_tokens)
        rank = self._rank(http)
        reply = shape(
            id=answer_id or f"{prefix}{http.headers.get('X-Request-Id') or secrets.token_hex(8)}",
            model=body.model or self.config.model_name,
            created=int(time.time()),
            shows_token_ids=bool(body.return_token_ids),
            options=body.stream_options or StreamOptions(),
            tool=body.demanded_tool,
            arguments=body.arguments if body.demanded_tool else "{}",
            said=() if body.demanded_tool else pieces_of(body.schema),
            thinks=body.reasoning_tokens,
            shows_logprobs=body.shows_logprobs,
            answers=body.answers,
        )
        if self._is_busy(len(prompts) * body.answers):
            self.rejections += 1
            return await _answer_error(http, EngineBusyError(), streams=bool(body.stream))
        asked = [prompt for prompt in prompts for _ in range(body.answers)]
        requests = [self._request(body, prompt, reply) for prompt in asked]
        transfer = transfer_of(body)
        if self.handover is not None and len(requests) == 1:  # a hand-over has a single reader
            try:
                requests = [await self.handover.prepared(rank, requests[0], transfer)]
            except (LoadFailedError, TransferFailedError) as error:
                return await _answer_error(http, error, streams=bool(body.stream))

        def lend(index: int) -> Json | None:
            if self.handover is None:
                return None
            return self.handover.lend(rank, requests[index], reply.id, http, transfer)

        in_room = nullcontext() if self.handover is None else self.handover.in_room(transfer)
        with rank.serving(requests) as mailbox, in_room:
            run = ReplyRun(requests, mailbox, reply, self.text, lend)
            if body.stream:
                answer = await _write_stream(http, run.stream())
            else:
                answer = _json(await run.whole())
            if self.handover is not None and not body.stream and run.choices[0].finish_reason != "abort":
                await self.handover.taken(transfer, run.choices[0].cached_tokens)
            if keep is not None:
                keep(run.choices[0])
            return answer

    async def _read(self, http: web.Request, kind: type[BodyT]) -> BodyT:
        if http.content_type != "application/json":
            raise SchemaError("Unsupported Media Type: Only 'application/json' is allowed")
        body = parse(kind, await http.read())
        if body.model and body.model not in (self.config.model_name, *self.config.loras):
            raise UnknownModelError(f"The model `{body.model}` does not exist.", param="model")
        return body

    def _check_lengths(self, prompts: list[EnginePrompt], max_tokens: int | None) -> None:
        limit = self.config.engine.max_model_len
        if max_tokens is not None and max_tokens > limit:
            raise BadRequestError(
                f"max_tokens={max_tokens} cannot be greater than max_model_len={limit}. "
                f"Please request fewer output tokens. (parameter=max_tokens, value={max_tokens})",
                param="max_tokens",
            )
        for prompt in prompts:
            _check_prompt(len(prompt.tokens), limit)

    def _request(self, body: Body, prompt: EnginePrompt, reply: Reply) -> EngineRequest:
        most = body.answer_tokens
        if reply.said:
            whole = reply.thinks + len(reply.said)
            most = whole if most is None else min(most, whole)
        return EngineRequest(
            id=str(next(self._numbers)),  # clients may use the same X-Request-Id twice at once
            prompt=prompt.tokens,
            media=prompt.media,
            max_tokens=most,
            ignore_eos=body.ignore_eos or bool(reply.said),
            lora_name=body.model if body.model in self.config.loras else None,
            salt=body.cache_salt,
        )

    def _rank(self, http: web.Request) -> Rank:
        """The rank that the header names, else the one with the fewest requests (vLLM's weights)."""
        header = http.headers.get("X-data-parallel-rank", "")
        try:
            number = int(header)
        except ValueError:
            # vLLM's weights: a waiting request counts four times as much as a running one
            return min(self.ranks, key=lambda rank: 3 * rank.engine.num_waiting + rank.num_unfinished)
        if not 0 <= number < len(self.ranks):
            raise BadRequestError(f"data_parallel_rank {number} is out of range [0, {len(self.ranks)}).")
        return self.ranks[number]

    def _is_busy(self, prompts: int) -> bool:
        limit = self.config.max_num_queued_reqs
        return limit is not None and sum(rank.num_unfinished for rank in self.ranks) + prompts > limit

    # --- the rest ---

    async def embeddings(self, http: web.Request) -> web.Response:
        """POST /v1/embeddings: vectors of length 1, equal for equal tokens. Nothing is computed or cached."""
        body = await self._read(http, EmbeddingBody)
        prompts = token_prompts(body.input) or await self.text.encode(TextPrompt(text_prompts(body.input)))
        self._check_lengths(prompts, None)
        model, dimensions = body.model or self.config.model_name, body.dimensions or DIMENSIONS
        if len(prompts) * dimensions > MOST_NUMBERS:
            raise BadRequestError(
                f"a mocker makes up {MOST_NUMBERS} numbers of a request at most", param="input"
            )
        return _json(embedded(prompts, model, dimensions, is_packed=body.encoding_format == "base64"))

    async def tokenize(self, http: web.Request) -> web.Response:
        """POST /tokenize."""
        body = await self._read(http, TokenizeBody)
        ((tokens, _),) = await self.text.encode(_tokenize_prompt(body))
        limit = self.config.engine.max_model_len
        return _json(
            {"count": len(tokens), "max_model_len": limit, "tokens": tokens.tolist(), "token_strs": None}
        )

    async def render(self, http: web.Request) -> web.Response:
        """POST /v1/chat/completions/render: the token ids; without the settings of sampling."""
        body = await self._read(http, ChatBody)
        ((tokens, _),) = await self.text.encode(_chat_prompt(body, body.reasoning_effort))
        return _json({"request_id": f"chatcmpl-{secrets.token_hex(16)}", "token_ids": tokens.tolist()})

    async def models(self, _: web.Request) -> web.Response:
        """GET /v1/models: the base model, then its LoRAs."""
        base = self.config.model_name
        root = str(self.config.model_path or base)
        cards = [self._card(base, root, None, self.config.engine.max_model_len)]
        cards += [self._card(name, name, base, None) for name in self.config.loras]
        return _json({"object": "list", "data": cards})

    def _card(self, name: str, root: str, parent: str | None, max_model_len: int | None) -> Json:
        return {
            "id": name,
            "object": "model",
            "created": int(self.started_at_s),
            "owned_by": "mocker",
            "root": root,
            "parent": parent,
            "max_model_len": max_model_len,
            "permission": [],
        }

    async def metrics(self, _: web.Request) -> web.Response:
        """GET /metrics."""
        text = _exposition(
            [rank.engine for rank in self.ranks],
            model_name=self.config.model_name,
            started_at_s=self.started_at_s,
            rejections=self.rejections,
            kv_connector=self.config.kv_connector,
        )
        return web.Response(body=text.encode(), headers={"Content-Type": _METRICS_TYPE})

    async def reset_prefix_cache(self, _: web.Request) -> web.Response:
        """POST /reset_prefix_cache; without success while requests hold blocks."""
        done = [rank.engine.reset_prefix_cache() for rank in self.ranks]
        return _json({"success": all(done)})

    async def speed(self, http: web.Request) -> web.Response:
        """POST /speed: run at another speed from the next step on, as a GPU does that is throttled."""
        body = parse(SpeedBody, await http.read())
        for rank in self.ranks:
            rank.engine.timing = self.config.engine.timing.scaled(body.speedup)
        return _json({"speedup": body.speedup})

    async def kv_event_sources(self, _: web.Request) -> web.Response:
        """GET /kv_event_sources: the endpoints of each rank."""
        return _json({str(number): _source(rank) for number, rank in enumerate(self.ranks)})

    async def health(self, _: web.Request) -> web.Response:
        """GET /health and /ping: 200 and no body."""
        return web.Response()

    async def version(self, _: web.Request) -> web.Response:
        """GET /version."""
        return _json({"version": VERSION})

    def app(self) -> web.Application:
        """The routes."""
        app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[_errors_as_vllm])
        app.add_routes(
            [
                web.post("/v1/completions", self.completions),
                web.post("/v1/chat/completions", self.chat_completions),
                web.post("/v1/chat/completions/render", self.render),
                web.post("/v1/messages", self.messages),
                web.post("/v1/messages/count_tokens", self.count_tokens),
                web.post("/v1/responses", self.responses),
                web.post("/v1/embeddings", self.embeddings),
                web.post("/tokenize", self.tokenize),
                web.post("/reset_prefix_cache", self.reset_prefix_cache),
                web.post("/speed", self.speed),
                web.get("/v1/models", self.models),
                web.get("/metrics", self.metrics),
                web.get("/kv_event_sources", self.kv_event_sources),
                web.get("/health", self.health),
                web.get("/ping", self.health),
                web.get("/version", self.version),
            ]
        )
        if self.handover is not None:
            self.handover.add_routes(app)
        return app


@web.middleware
async def _errors_as_vllm(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Errors with vLLM's body; unknown routes with FastAPI's."""
    try:
        return await handler(request)
    except KvRouterError as error:
        form = messages if request.path.startswith(_ANTHROPIC) else openai
        return web.Response(body=form.error_body(error), status=error.status, content_type="application/json")
    except web.HTTPException as error:
        return _json({"detail": error.reason}, status=error.status)


async def _write_stream(http: web.Request, parts: AsyncIterator[bytes]) -> web.StreamResponse:
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(http)
    with contextlib.suppress(ConnectionResetError):  # the client has left, and its task is not cancelled yet
        await response.write(b"")  # sends the head before the first token, as vLLM does
        async for part in parts:
            await response.write(part)
        await response.write_eof()
    return response


async def _answer_error(http: web.Request, error: KvRouterError, *, streams: bool) -> web.StreamResponse:
    """Raise it; for a stream, 200 with an error event: vLLM sends the head before it knows."""
    if not streams:
        raise error
    response = web.StreamResponse(headers=_SSE_HEADERS)
    await response.prepare(http)
    if http.path.startswith(_ANTHROPIC):
        await response.write_eof(messages.error_event(error))
    else:
        await response.write_eof(openai.error_event(error) + DONE)
    return response


def _json(data: Json, *, status: int = 200) -> web.Response:
    return web.Response(body=encode(data), status=status, content_type="application/json")


def _check_prompt(length: int, limit: int) -> None:
    if length == 0:
        raise BadRequestError("The decoder prompt cannot be empty", param="prompt")
    if length > limit:
        raise BadRequestError(
            f"This model's maximum context length is {limit} tokens. However, your prompt contains {length} "
            "input tokens, which exceeds this limit even without any output tokens. Please reduce the length "
            f"of the input prompt. (parameter=input_tokens, value={length})",
            param="input_tokens",
        )
    if length == limit:
        raise BadRequestError("max_tokens must be at least 1, got 0.", param="max_tokens")


def _ids_sent(body: ChatBody) -> list[EnginePrompt] | None:
    """Token ids in place of the messages, as vLLM takes them: not of a chat with images."""
    ids = body.kv_transfer_params.prompt_token_ids if body.kv_transfer_params is not None else None
    if ids is None or has_media(_chat_prompt(body)):
        return None
    if not ids:
        raise BadRequestError(
            "`kv_transfer_params['prompt_token_ids']` must be a non-empty list of non-negative integers.",
            param="kv_transfer_params.prompt_token_ids",
        )
    return token_prompts(ids)


def _chat_prompt(body: ChatBody | TokenizeBody, effort: str | None = None) -> ChatPrompt:
    return ChatPrompt(
        body.messages or [],
        tools=body.tools,
        add_generation_prompt=body.add_generation_prompt,
        continue_final_message=body.continue_final_message,
        chat_template_kwargs=body.chat_template_kwargs or {},
        effort=effort,
        add_special_tokens=bool(body.add_special_tokens),
    )


def _tokenize_prompt(body: TokenizeBody) -> ChatPrompt | TextPrompt:
    if body.messages is None:
        return TextPrompt([body.prompt or ""], add_special_tokens=body.add_special_tokens is not False)
    return _chat_prompt(body)


def _source(rank: Rank) -> Json:
    """The KVEventsConfig of one rank, as vLLM reports it."""
    return {
        "enable_kv_cache_events": True,
        "publisher": "zmq",
        "endpoint": rank.publisher.endpoint,
        "replay_endpoint": rank.publisher.replay_endpoint,
        "buffer_steps": rank.publisher.buffer_steps,
        "hwm": PUB_HIGH_WATER_MARK,
        "max_queue_size": 100_000,
        "topic": rank.publisher.topic,
    }


_METRICS_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def _exposition(
    engines: Sequence[Engine],
    *,
    model_name: str,
    started_at_s: float,
    rejections: int,
    kv_connector: str | None,
) -> str:
    """The text of /metrics in vLLM's names and labels; one engine per data-parallel rank."""
    lines = [
        "# TYPE process_start_time_seconds gauge",
        f"process_start_time_seconds {started_at_s}",
        "# TYPE vllm:admission_rejections_total counter",
        f'vllm:admission_rejections_total{{model_name="{model_name}",reason="max_num_queued_reqs"}} '
        f"{float(rejections)}",
    ]
    for rank, engine in enumerate(engines):
        labels = f'engine="{rank}",model_name="{model_name}"'
        values = [*_values(engine), *(_transfer_values(engine, kv_connector) if kv_connector else ())]
        lines += (f"{name}{{{labels}}} {float(value)}" for name, value in values)
        lines.append(f"vllm:cache_config_info{{{_cache_labels(engine)},{labels}}} 1.0")
    return "\n".join(lines) + "\n"


def _values(engine: Engine) -> Iterator[tuple[str, float]]:
    counters = engine.counters
    yield "vllm:num_requests_running", engine.num_running
    yield "vllm:num_requests_waiting", engine.num_waiting
    yield "vllm:kv_cache_usage_perc", engine.kv_usage
    yield "vllm:prefix_cache_queries_total", counters.cache_queries
    yield "vllm:prefix_cache_hits_total", counters.cache_hits
    yield "vllm:prompt_tokens_total", counters.prompt
    yield "vllm:prompt_tokens_cached_total", counters.cache_hits
    yield "vllm:generation_tokens_total", counters.generated
    yield "vllm:num_preemptions_total", counters.preemptions
    yield "vllm:request_success_total", counters.finished


def _transfer_values(engine: Engine, kv_connector: str) -> Iterator[tuple[str, float]]:
    counters = engine.counters
    yield "vllm:external_prefix_cache_queries_total", counters.external_queries
    yield "vllm:external_prefix_cache_hits_total", counters.external_hits
    if kv_connector != "example":
        block_bytes = engine.config.block_size * TOKEN_BYTES
        yield f"vllm:{kv_connector}_bytes_transferred_sum", counters.transferred_blocks * block_bytes
        yield f"vllm:{kv_connector}_bytes_transferred_count", counters.transfers
        yield f"vllm:{kv_connector}_xfer_time_seconds_count", counters.transfers
        yield f"vllm:{kv_connector}_num_descriptors_sum", counters.transferred_blocks
        yield f"vllm:{kv_connector}_num_failed_transfers_total", counters.failed_transfers
        yield f"vllm:{kv_connector}_num_kv_expired_reqs_total", counters.expired_leases


def _cache_labels(engine: Engine) -> str:
    """The labels from which an agent reads block size and capacity."""
    config = engine.config
    labels = {
        "block_size": config.block_size,
        "num_gpu_blocks": config.num_blocks,
        "num_cpu_blocks": config.host_blocks,
        "kv_cache_size_tokens": config.num_blocks * config.block_size,
        "enable_prefix_caching": True,
        "prefix_caching_hash_algo": "xxhash",
    }
    return ",".join(f'{name}="{value}"' for name, value in labels.items())
