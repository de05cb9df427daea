"""What callers send: a prompt in any form, and where it may go. Dynamo's fields, and kvrouter's own."""

from __future__ import annotations

from array import array
from typing import Annotated

from msgspec import Meta, Raw, Struct

from kvrouter.bodies.scan import read_hashes
from kvrouter.core.fleet.pool import Pool
from kvrouter.core.routing.policy import Prompt, RouteRequest, Wanted
from kvrouter.core.tables.bookings import MOST_TOKENS
from kvrouter.core.wire.hashes import chain_of
from kvrouter.core.wire.heartbeats import Card
from kvrouter.core.wire.ids import Target, WorkerId
from kvrouter.core.wire.values import MOST_AMOUNT, MOST_FINITE, MOST_ID_CHARACTERS, Line
from kvrouter.errors import BadRequestError, NoWorkersError, UnknownModelError, UnknownTargetError
from kvrouter.prompts.ways import Naming, named
from kvrouter.router.reservations import MOST_LEASE_S
from kvrouter.tokens.prefix_tokens import Encoded

# The model and the group of a body that names none, as Dynamo's service has it.
DEFAULT = "default"
# A label of a worker that a caller registered: the number of its first rank, as its callers count.
FIRST_RANK = "first-rank"
_NOTHING = Raw()

# Control characters would forge a line of a log; peers could not decode more characters.
Id = Annotated[str, Meta(min_length=1, max_length=MOST_ID_CHARACTERS, pattern=r"\A[^\x00-\x1f\x7f]*\Z")]
WorkerName = int | Annotated[str, Meta(max_length=129)]
RankNumber = Annotated[int, Meta(ge=0, lt=1 << 32)]
_Weight = Annotated[float, Meta(ge=0, le=MOST_FINITE)]


class Pinned(Struct, frozen=True):
    worker_id: WorkerName
    dp_rank: RankNumber | None = None


class Override(Struct, frozen=True):
    """Newer versions of Dynamo say credit, older ones weight."""

    overlap_score_weight: _Weight | None = None
    overlap_score_credit: _Weight | None = None
    router_temperature: _Weight | None = None
    track_prefill_tokens: bool | None = None


class SessionContext(Struct, frozen=True):
    session_id: Id
    parent_session_id: Id = ""


class PlacementAsk(Struct, frozen=True):
    """`tenant_id` and `reservation_id` are former names of `routing_group` and `selection_id`."""

    model_name: Line = DEFAULT
    routing_group: Line | None = None
    tenant_id: Line | None = None
    selection_id: Id | None = None
    reservation_id: Id | None = None
    token_ids: list[int] | None = None
    block_hashes: Raw = _NOTHING
    sequence_hashes: Raw = _NOTHING
    isl_tokens: Annotated[int, Meta(ge=0, le=MOST_TOKENS)] | None = None
    block_size: Annotated[int, Meta(ge=0, le=MOST_AMOUNT)] | None = None
    router_config_override: Override | None = None
    session_id: Id | None = None
    session_context: SessionContext | None = None
    pinned_worker: Pinned | None = None
    worker_id: WorkerName | None = None
    dp_rank: RankNumber | None = None
    allowed_worker_ids: list[WorkerName] | None = None
    track_prefill_tokens: bool | None = None
    # kvrouter's own; `request` is a client's whole body: tools, templates and adapters count, too
    text: str | None = None
    messages: Raw = _NOTHING
    request: Raw = _NOTHING
    lora_name: Line | None = None
    cache_salt: Line | None = None
    lease_s: Annotated[float, Meta(gt=0, le=MOST_LEASE_S)] | None = None
    stream: bool = True
    """Whether the end of prefill will be reported. If not, it is predicted."""

    @property
    def id(self) -> str | None:
        return self.selection_id or self.reservation_id

    @property
    def group(self) -> str:
        return self.routing_group or self.tenant_id or DEFAULT

    @property
    def has_text(self) -> bool:
        return self.text is not None or is_given(self.messages) or is_given(self.request)

    def check(self) -> None:
        """Raise BadRequestError if there are several prompts."""
        hashes = (self.block_hashes, self.sequence_hashes)
        lists = [self.token_ids is not None, any(is_given(one) and bytes(one) != b"[]" for one in hashes)]
        texts = [self.text is not None, is_given(self.messages), is_given(self.request)]
        if sum(lists) + sum(texts) > 1:
            what = "give one of token_ids, hashes, text, messages and request"
            raise BadRequestError(what, param="token_ids")

    @property
    def charges(self) -> bool:
        """Whether the worker computes the prompt: not where another one has."""
        override = self.router_config_override or Override()
        return False not in {self.track_prefill_tokens, override.track_prefill_tokens}

    def of_tokens(self, request_id: str, pool: Pool) -> RouteRequest:
        """The request, if it has no text. Raises BadRequestError."""
        lora_name = self.lora_name or (self.model_name if self.model_name in pool.lora_names else None)
        return RouteRequest(request_id, _prompts(self, pool, lora_name), lora_name=lora_name)

    def pinned(self, pool: Pool) -> Wanted | None:
        """The target that must serve it. Raises UnknownTargetError."""
        pinned = self.pinned_worker
        if pinned is None and self.worker_id is not None:
            pinned = Pinned(self.worker_id, self.dp_rank)
        if pinned is None:
            return None
        worker = pool.workers.get(WorkerId(str(pinned.worker_id)))
        rank = None if worker is None or pinned.dp_rank is None else pinned.dp_rank - first_rank(worker.card)
        if worker is None or (rank is not None and rank not in range(worker.card.ranks)):
            name = str(pinned.worker_id)[:100] + ("" if worker is None else f" with rank {pinned.dp_rank}")
            raise UnknownTargetError(f"no worker {name} serves {pool.model!r}: see GET /workers")
        return Wanted(WorkerId(worker.card.worker_id), rank)

    def check_adapter(self, pool: Pool) -> None:
        """Raise UnknownModelError if no worker serves it."""
        if self.lora_name and self.lora_name not in pool.lora_names and not pool.settings.lora_multiplex:
            raise UnknownModelError(f"no worker of {pool.model!r} has the adapter {self.lora_name[:100]!r}")

    def excluded(self, pool: Pool) -> frozenset[Target]:
        """The targets that must not serve it. Raises NoWorkersError if none is left."""
        if self.allowed_worker_ids is None:
            return frozenset()
        allowed = {*map(str, self.allowed_worker_ids)}
        excluded = frozenset(target for target in pool.targets if target.worker_id not in allowed)
        if len(excluded) == len(pool.targets):
            raise NoWorkersError(f"none of allowed_worker_ids serves {pool.model!r} now: see GET /workers")
        return excluded


def is_given(raw: Raw | array[int]) -> bool:
    return isinstance(raw, array) or bytes(raw) not in {b"", b"null"}


def first_rank(card: Card) -> int:
    """The number of its first rank, as its callers count them."""
    given = card.labels.get(FIRST_RANK, "")
    return int(given) if given.isascii() and given.isdecimal() and len(given) <= 10 else 0


def _prompts(asked: PlacementAsk, pool: Pool, lora_name: str | None) -> tuple[Prompt, ...]:
    """The blocks of a prompt of tokens or hashes; none: it is placed by load."""
    size = pool.block_size
    if asked.block_size not in {None, 0, size}:
        raise BadRequestError(f"block_size {asked.block_size}: the workers have {size}", param="block_size")
    if asked.token_ids is not None:
        asked.check()
        naming = Naming(pool, None, lora_name, asked.cache_salt)
        return named([Encoded(asked.token_ids, len(asked.token_ids))], naming)
    hashes = _chain(asked)
    isl = len(hashes) * size if asked.isl_tokens is None else asked.isl_tokens
    if len(hashes) * size > isl:
        what = f"isl_tokens {isl}: {len(hashes)} blocks of {size} tokens are longer"
        raise BadRequestError(f"{what}; name whole blocks only, and the prompt's length", param="isl_tokens")
    return (Prompt(hashes, isl, block_size=size),) if isl and size else ()


def _chain(asked: PlacementAsk) -> array[int]:
    """The sequence hashes that are given, or made of the block hashes. Raises BadRequestError."""
    chain = given_hashes("sequence_hashes", asked.sequence_hashes)
    if is_given(asked.block_hashes):
        made = chain_of(given_hashes("block_hashes", asked.block_hashes))
        if chain != made and is_given(asked.sequence_hashes):
            raise BadRequestError(
                "sequence_hashes are not the chain of block_hashes: XXH3-64 with seed 1337 over the hash "
                "before and the block's own; give one of the two lists",
                param="sequence_hashes",
            )
        return made
    if isinstance(asked.sequence_hashes, Raw):  # else it was read in steps, with this
        check_distinct("sequence_hashes", chain, {*chain})
    return chain


def check_distinct(name: str, chain: array[int], blocks: set[int]) -> None:
    """Raise BadRequestError if the chain has more than these blocks."""
    if len(blocks) < len(chain):
        raise BadRequestError(f"{name}: no block may be named twice", param=name)


def given_hashes(name: str, given: Raw | array[int]) -> array[int]:
    """Hashes as unsigned numbers; services that know signed ones only send those."""
    if isinstance(given, array):  # of a large body
        return given
    if not is_given(given):
        return array("Q")
    listed = bytes(given)
    if not listed.startswith(b"["):
        raise BadRequestError(f"{name}: a list of numbers is expected", param=name)
    try:
        return read_hashes(listed, 1, len(listed) - 1)
    except ValueError as error:  # of msgspec, too
        raise BadRequestError(f"{name}: {error}", param=name) from None
