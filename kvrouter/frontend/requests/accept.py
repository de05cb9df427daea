"""The first half of the request path: bytes become a request that can be routed.

body ──> parsed fields ──> pool ──> overrides ──> tokens, hashes, text ──> Work
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from functools import partial
from types import MappingProxyType
from typing import TypeVar

import msgspec
import structlog
from msgspec import UNSET, Struct
from msgspec.structs import replace

from kvrouter.bodies import lax, openai, responses
from kvrouter.bodies.aliases import renamed, renamed_target
from kvrouter.bodies.apis import Api, Parse, unnamed
from kvrouter.bodies.edits import (
    Edit,
    apply,
    edits_of,
    may_have_priority,
    removed_from,
    token_ids_field,
    with_field,
    with_request_id,
    without_priority,
)
from kvrouter.bodies.lax import PLAIN, in_utf8
from kvrouter.bodies.reader import LARGE_BYTES, LargeBody, in_slices
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.fleet.pools import Pools
from kvrouter.core.fleet.router import Router
from kvrouter.core.routing.builtin_policy import BuiltInPolicy
from kvrouter.core.routing.policy import Prompt, RouteRequest, Wanted
from kvrouter.core.tables.predictions import PredictionKind
from kvrouter.core.tables.tenants import NO_LIMITS
from kvrouter.errors import BadRequestError, KeyForbidsError, NotMendedError, UnknownResponseError
from kvrouter.frontend.keys.clients import ALL, Caller
from kvrouter.frontend.keys.keys_file import Key
from kvrouter.frontend.keys.limits import TenantLimits
from kvrouter.frontend.operators.rights import Rights
from kvrouter.frontend.records.record import Record, SentIds, Traits, Work, clock
from kvrouter.frontend.requests import engine_routes, passthrough
from kvrouter.frontend.requests.first_worker import FirstWorker
from kvrouter.frontend.requests.kept_responses import (
    MOST_ID_CHARACTERS,
    KeptResponse,
    KeptResponses,
    NewResponse,
    find_response,
    new_response_id,
)
from kvrouter.frontend.requests.overrides import (
    DIRECT,
    NO_OVERRIDES,
    AcceptedOverrides,
    Overrides,
    find_wanted,
    forbids,
    read_overrides,
)
from kvrouter.frontend.requests.owners import owned
from kvrouter.prompts.ways import Naming, PromptWays, Sendable
from kvrouter.relay.request import OVERRIDES, Request
from kvrouter.telemetry.metrics import RequestMetrics
from kvrouter.tokens import prompt as texts
from kvrouter.tokens.prompt import ChatPrompt, TextPrompt

Asked = TypeVar("Asked", bound=openai.CompletionRequest)

log = structlog.get_logger()

# A text with more characters than this for each token of the model's length is not tokenized: its engine will
# reject it, and tokenizing 30 MB of text would take 40 s.
_MOST_CHARACTERS_PER_TOKEN = 64
_UNKNOWN_MODEL_LEN = 131_072
_UNSALTED = "with --tenant-cache-salt this route is closed: engines take no salt there"
# To hash more takes 100,000 instructions.
_MANY_BLOCKS = 1_024


class _Read(Struct, frozen=True):
    """A body and what was read from it."""

    body: bytes
    large: LargeBody | None
    asked: openai.CompletionRequest
    """Of a large body without what is in its holes (reader.py)."""
    parse: Parse | None
    router: Router
    before: KeptResponse | None
    """The response that it continues."""
    is_json: bool
    rename: Edit | None
    """Replaces an alias by its model's own name."""
    owner: str
    """Whose the response will be; empty for requests of other APIs."""


class Accept:
    def __init__(
        self,
        pools: Pools,
        blocks: PromptWays,
        metrics: RequestMetrics,
        dialect: AcceptedOverrides,
        aliases: Mapping[str, str] = MappingProxyType({}),
        *,
        wait_for_workers_s: float = 0.0,
        limits: TenantLimits,
        salts: bool = False,
    ) -> None:
        """`salts`: whether prefixes of keys are kept apart (--tenant-cache-salt)."""
        self._pools = pools
        self._first_worker = FirstWorker(pools.has_names, wait_for_workers_s) if wait_for_workers_s else None
        self._blocks = blocks
        self._metrics = metrics
        self.dialect = dialect
        self.aliases = aliases
        self.limits = limits
        self._salts = salts
        self.kept = KeptResponses()
        self._has_warned = False  # of the object `kvrouter`, which the release after this one no longer reads

    async def work(self, record: Record, api: Api, rights: Rights | None) -> Work:
        """Read what routing needs from a request. Raises KvRouterError. `rights`: its client's; None: all."""
        request, found_ids = record.request, list[Sendable]()
        client = rights.of(request) if rights and (rights.are_limited or rights.key.is_set) else ALL
        read = await self._read(record, api, client)
        asked, router, key = read.asked, read.router, client.key
        overrides = self._overrides(request, read, client)
        wanted, mode = _wanted(request, read, overrides)
        policy = (router.modes.of(mode) if mode else router.modes.default).policy
        if read.large is not None:
            asked = await _whole(read, read.large, api, policy)
        # also in a mode without tokens, if others of the pool are placed by what its booking holds
        needs_tokens = policy.needs_tokens or router.needs_tokens
        prompts = await self._prompts(asked, router, api, record, found_ids, client) if needs_tokens else ()
        charge = None
        if key is not None and key.tenant in self.limits.counted and not overrides.dry_run:
            charge = self.limits.charge(key, api, read, prompts)
        # at most 15 keywords: CPython passes more by a dict, which takes 1 % of a request
        route = RouteRequest(
            record.id,
            prompts,
            lora_name=(lora_name := _lora_name(router, asked)),
            overlap_weight=overrides.overlap_weight,
            temperature=overrides.temperature,
            text=texts.plain_text(asked.prompt) if policy.needs_text else "",
            session=overrides.session,
            bucket=overrides.bucket,
            wanted=wanted,
            priority=_priority(asked, overrides, client),
            parent_session=overrides.parent_session,
            mode=mode,
            reads_cache=asked.reads_cache,
            served_name=asked.model if asked.model in router.pool.uneven_names else "",
            context_tokens=0 if router.pool.has_equal_contexts else _context_tokens(asked, prompts),
            may_split=router.pool.split.may_share and wanted is None and _may_split(asked, prompts, api),
            charge=charge,
        )
        sent, response = _with_id(self._edited(request, read, client), asked, read)
        ids = await _sent_ids(asked, prompts, found_ids[0]) if found_ids else None
        # last: a client that left before is not counted
        limits = await self.limits.begin(key, api, charge) if key and charge else ""
        return Work(
            record.id,
            request,
            sent,
            asked.stream,
            route=route,
            router=router,
            received_at=record.received_at,
            traits=_traits(asked, lora_name, prompts, api) if prompts else None,
            api=api if client.sees_workers else unnamed(api),
            response=response,
            is_dry_run=overrides.dry_run,
            reads_end=policy.reads_ends,
            shows_worker=client.sees_workers,
            key=key,
            ids=ids,
            limits=limits,
        )

    async def _read(self, record: Record, api: Api, client: Caller) -> _Read:
        """Parse the body. A response continues the chat of the one before it."""
        if self._first_worker is not None:
            await self._first_worker.wait()
        request, now, key = record.request, record.received_at, client.key
        parse, before, owner = api.parse, None, ""
        if key is not None:
            record.tenant = key.tenant
            if key.max_body_bytes:
                await request.read_at_most(key.max_body_bytes, "max-body-bytes of the key")
        body = await request.read() if request.body is None else request.body
        is_json = bool(body) and (parse is not None or passthrough.is_json(request))
        if not body.startswith(PLAIN) and is_json:
            body = in_utf8(body) if len(body) <= LARGE_BYTES else await asyncio.to_thread(in_utf8, body)
        large = None
        if len(body) > LARGE_BYTES:
            if parse is not None:
                large = await LargeBody.read(body)
            elif is_json and len(body) > passthrough.MOST_INPUT_BYTES:
                large = await LargeBody.read_fields(body, passthrough.FIELDS)
        asked, large = await _parsed(parse or partial(passthrough.parse, request), body, large)
        model = self.aliases.get(asked.model or "", asked.model)
        some = key if key is not None and key.models else None
        router = self._pools.router_for(model) if some is None else self._router_for(some, asked.model, model)
        if isinstance(asked, responses.ResponseRequest):
            owner = client.owner(request.headers)
            before = self._response_before(asked, router, owner, now)
            self._check_own_id(asked, router, owner, now)
            if before is not None:
                parse = partial(responses.parse, history=before.chat)
                asked = responses.continued(asked, before.chat)
        if large is not None:
            large.check_length(asked, _longest_context(router.pool))
        rename = None
        if asked.model and (model := self.aliases.get(asked.model)) is not None:
            asked, rename = _without_alias(request, asked, asked.model, model)
        return _Read(
            body=body,
            large=large,
            asked=asked,
            parse=parse,
            router=router,
            before=before,
            is_json=is_json,
            rename=rename,
            owner=owner,
        )

    def _router_for(self, key: Key, asked: str | None, model: str | None) -> Router:
        """For a key of some models. `model`: the one that is asked for, perhaps by an alias."""
        if asked is not None:  # before the look-up: no key learns of others' models
            _check_models(key, {asked, model or ""})
        router = self._pools.router_for(model)
        if asked is None:
            _check_models(key, router.pool.servers)
        return router

    def _edited(self, request: Request, read: _Read, client: Caller) -> bytes:
        """The body that an engine gets. What the client sent and no engine gets is counted."""
        may_override = client.may_override
        salts = self._salts and client.key is not None and read.is_json
        is_plain = (
            read.asked.is_plain and read.rename is None and not request.head.has_overrides and not salts
        )
        if is_plain and may_override:  # nearly always
            return read.body
        body, edits, removed = read.body, edits_of(read.asked), removed_from(read.asked)
        if (
            not may_override
            and read.is_json
            and may_have_priority(body if read.large is None else read.large.rest)
        ):
            edits.append(without_priority)
        if read.rename is not None:
            edits.append(read.rename)
        if salts and client.key is not None:  # last: of two fields with one name the last one counts
            edits.append(_salting(client.key, "cache_salt", read.asked.cache_salt))
            if request.head.route in engine_routes.EXTRA_KEYED:
                edits.append(_salting(client.key, "extra_key", read.asked.extra_key))
        if edits:
            body = apply(edits, body) if read.large is None else read.large.edited(edits)
        if request.head.has_overrides:
            removed.add(f"{OVERRIDES}*")
        for kind in removed:
            self._metrics.removed_fields.inc(kind)
        return body

    def _response_before(
        self, asked: responses.ResponseRequest, router: Router, owner: str, now: float
    ) -> KeptResponse | None:
        """The response that a request continues, if it is known and its target is live.

        Raises UnknownResponseError if it is another client's.
        """
        if asked.previous_id is None:
            return None
        target_of = partial(router.tables.sessions.target_of, now=now)
        found = find_response(asked.previous_id, owner, self.kept, target_of)
        return found if found is not None and found.target in router.pool.targets else None

    def _check_own_id(self, asked: responses.ResponseRequest, router: Router, owner: str, now: float) -> None:
        """Raise BadRequestError if the client chose an id that another client's response has."""
        if asked.own_id is None or len(asked.own_id) > MOST_ID_CHARACTERS:
            return
        try:
            find_response(asked.own_id, owner, self.kept, partial(router.tables.sessions.target_of, now=now))
        except UnknownResponseError:
            raise BadRequestError("`request_id`: choose another one", param="request_id") from None

    def _overrides(self, request: Request, read: _Read, client: Caller) -> Overrides:
        asked = read.asked
        key = client.key
        if key is not None:
            if asked.is_odd or key.models or asked.engine_arguments is not UNSET:
                _check_steering(key, read)
            if self._salts and request.head.route in engine_routes.UNSALTED:
                raise KeyForbidsError(_UNSALTED)
        names_none = self.dialect.headers.isdisjoint(request.headers)
        if names_none and asked.kvrouter is None and not asked.session_id and asked.nvext is None:
            return NO_OVERRIDES  # most requests
        if asked.kvrouter is not None and not self._has_warned:
            self._has_warned = True
            log.warning("request.deprecated_object", object="kvrouter", use="headers x-kvrouter-…, or nvext")
        nvext = asked.nvext.overrides() if asked.nvext is not None else {}
        ignored = None if client.may_override else self._count_ignored
        found = read_overrides(
            request.headers,
            asked.kvrouter,
            asked.session_id,
            self.dialect,
            nvext,
            ignored=ignored,
            forbidden=client.forbidden,
        )
        owner = (read.owner or client.owner(request.headers)) if found.session else ""
        if not owner:
            return found
        session, parent = owned(found.session, owner), owned(found.parent_session, owner)
        return dataclasses.replace(found, session=session, parent_session=parent)

    def _count_ignored(self) -> None:
        self._metrics.removed_fields.inc("overrides")

    async def _prompts(  # noqa: PLR0917  # all that is known so far
        self,
        asked: openai.CompletionRequest,
        router: Router,
        api: Api,
        record: Record,
        found_ids: list[Sendable],
        client: Caller,
    ) -> tuple[Prompt, ...]:
        """Token ids, then hashes. Empty if the tokens are not known.

        `found_ids` gets the ids of a chat that are to be sent with it.
        """
        prompt = asked.prompt
        if prompt is None or (api.parse is None and not _caches(router.pool)):
            return ()
        if asked.token_ids is not None and router.pool.takes_token_ids and not texts.has_media(prompt):
            prompt = texts.TokenPrompt([asked.token_ids])
        most_characters = _MOST_CHARACTERS_PER_TOKEN * (router.pool.max_model_len or _UNKNOWN_MODEL_LEN)
        if texts.text_characters(prompt) > most_characters:
            return ()
        found = found_ids.append if asked.may_be_ids and router.pool.sends_token_ids else None
        lora_name, salt = _lora_name(router, asked), asked.cache_salt
        if self._salts and client.key is not None:
            salt = client.key.salted(salt)
        naming = Naming(router.pool, asked.model, lora_name, salt, asked.extra_key, found)
        began = clock()
        try:
            prompts = await self._blocks.hashes(prompt, naming)
        finally:
            record.tokenized = began, clock()
            self._metrics.steps.observe(record.tokenized[1] - began, "tokenize")
        if sum([len(one.hashes) for one in prompts]) > _MANY_BLOCKS:
            await asyncio.sleep(0)  # to route it takes one step, which hashing would make longer
        return prompts


async def _parsed(
    parse: Parse, body: bytes, large: LargeBody | None
) -> tuple[openai.CompletionRequest, LargeBody | None]:
    """The request, and its body if that has to be read in slices."""
    if large is None:
        try:
            return parse(body), None
        except NotMendedError:
            large = LargeBody(body)
    return await large.parse(parse), large


async def _whole(read: _Read, large: LargeBody, api: Api, policy: BuiltInPolicy) -> openai.CompletionRequest:
    """The request with what is in the holes of its body, if something depends on its prompt."""
    asked, router = read.asked, read.router
    if not large.holes:
        return asked
    needs_tokens = router.needs_tokens or policy.needs_tokens or policy.needs_text
    is_remembered = isinstance(asked, responses.ResponseRequest)
    if read.parse is None or not (needs_tokens or is_remembered or not router.pool.has_equal_contexts):
        return asked
    longest = _longest_context(router.pool)
    return await large.whole(asked, read.parse, longest, is_native=api.converted is None)


def _wanted(request: Request, read: _Read, overrides: Overrides) -> tuple[Wanted | None, str]:
    """The target that a request has to go to, if any, and the mode that places it."""
    if overrides.target:
        return find_wanted(overrides.target, request.headers, read.router.pool), overrides.mode
    if read.before is not None:
        # No other engine has the response, not even if this one has lost the blocks of its chat.
        return read.before.wanted, DIRECT
    return None, overrides.mode


def _with_id(body: bytes, asked: openai.CompletionRequest, read: _Read) -> tuple[bytes, NewResponse | None]:
    """The body, of a response with an id, which is remembered if the engine may keep it."""
    if not isinstance(asked, responses.ResponseRequest):
        return body, None
    before, owner = read.before, read.owner
    if not asked.is_kept or len(asked.own_id or "") > MOST_ID_CHARACTERS:
        return body, None
    response_id = asked.own_id or new_response_id(owner)
    chat = asked.prompt.messages if isinstance(asked.prompt, ChatPrompt) else None
    size_bytes = len(body) + (before.size_bytes if before is not None else 0)
    new = NewResponse(response_id, chat, size_bytes, owner)
    return body if asked.own_id is not None else with_request_id(body, response_id), new


def _without_alias(request: Request, asked: Asked, alias: str, model: str) -> tuple[Asked, Edit]:
    """The request by its model's own name, and the edit that its body needs. Its query is changed at once."""
    target = renamed_target(request.head.path, alias, model)
    if target != request.head.path:
        request.head = request.head.at(request.head.method, target)  # a new one: requests share heads
    content_type = request.headers.get("content-type", "")
    edit = partial(renamed, content_type=content_type, alias=alias, model=model)
    return replace(asked, model=model), edit


async def _sent_ids(
    asked: openai.CompletionRequest, prompts: tuple[Prompt, ...], sendable: Sendable
) -> SentIds:
    field = await in_slices(token_ids_field(sendable.ids))
    return SentIds(field, sendable, _context_tokens(asked, prompts))


def _may_split(asked: openai.CompletionRequest, prompts: Sequence[Prompt], api: Api) -> bool:
    """Whether two workers may serve it: what is handed over can be read once, for one answer."""
    is_one = len(prompts) == 1 and asked.n == 1 and asked.best_of <= 1 and not asked.is_beam_search
    return api.is_native and is_one and asked.reads_cache and not asked.echoes and asked.token_ids is None


def _context_tokens(asked: openai.CompletionRequest, prompts: tuple[Prompt, ...]) -> int:
    """What the longest prompt and the asked output take of a context, estimated if tokens are not known."""
    longest = max([prompt.isl for prompt in prompts], default=0) or texts.estimated_isl(asked.prompt)
    return longest + max(1, asked.asked_output)


_WORDS: dict[type, str] = {ChatPrompt: "chat", TextPrompt: "text"}


def _traits(
    asked: openai.CompletionRequest, lora_name: str | None, prompts: Sequence[Prompt], api: Api
) -> Traits:
    """`prompts`: those whose tokens are known."""
    kind: PredictionKind | None = None  # if the tokens are not known, or known only up to an image
    if not [prompt for prompt in prompts if not prompt.is_known]:  # half the time of `all`
        name = api.converted or _WORDS.get(type(asked.prompt), "tokens")
        kind = PredictionKind(name, bool(lora_name), bool(asked.cache_salt))  # type: ignore[arg-type]  # one of its names
    # Engines report the cached tokens of one prompt and one answer only.
    is_single = len(prompts) == 1 and asked.n == 1 and not asked.is_beam_search
    return Traits(kind, is_single, asked.reads_cache)


def _priority(asked: openai.CompletionRequest, overrides: Overrides, client: Caller) -> int:
    """Lower goes first. All clients without keys or the right to choose are equal."""
    key = client.key
    if asked.priority and "priority" in client.forbidden:
        raise forbids("priority", "`priority`")
    if not client.may_override:
        return 0 if key is None else key.priority
    given = asked.priority if overrides.priority is None else overrides.priority
    return given or (0 if key is None else key.priority)


def _salting(key: Key, field: str, own: str | None) -> Edit:
    """The edit that replaces this field."""
    written = msgspec.json.encode(field) + b":" + msgspec.json.encode(key.salted(own))
    return partial(with_field, field=written)


def _check_steering(key: Key, read: _Read) -> None:
    """Raise KeyForbidsError for a field of the body by which the request chooses more than its key may."""
    if not read.is_json and not read.body.lstrip().startswith(b"{"):
        return  # not even an engine takes for JSON what its client calls otherwise
    raw = read.body if read.large is None else read.large.rest
    for name in lax.steering_in(raw) if lax.may_steer(raw) else ():
        match name:
            case "lora_path" if key.models:
                raise KeyForbidsError("the API key may use some models only: name one in `model`", param=name)
            case "lora_path":
                is_forbidden = False
            case "background":
                # where bodies are read limits.py counts it; elsewhere it only outlives a client that has left
                is_forbidden = read.parse is None and key.limits != NO_LIMITS
            case _:
                is_forbidden = ("priority" if name == "priority" else "target") in key.forbidden
        if is_forbidden:
            raise forbids(name, f"`{name}`")


def _check_models(key: Key, names: Collection[str]) -> None:
    """Raise KeyForbidsError for a model that is not of the key, whether it is served or not."""
    if not key.may_use(names):
        raise KeyForbidsError(f"the API key may use: {', '.join(key.models)}", param="model")


def _caches(pool: Pool) -> bool:
    """Whether an engine may reuse what it computed. Those with bidirectional attention (BERT) cannot."""
    return any(worker.card.prefix_caching is not False for worker in pool.workers.values())


def _longest_context(pool: Pool) -> int:
    """Tokens that fit the worker with the longest context; 0 if a worker's is not known."""
    lengths = [worker.card.max_model_len for worker in pool.workers.values()]
    return max(lengths) if lengths and all(lengths) else 0


def _lora_name(router: Router, asked: openai.CompletionRequest) -> str | None:
    """The model that the client names, if it is an adapter."""
    return asked.model if asked.model in router.pool.lora_names else None
