"""Decisions as people see them: previewed (a dry run), kept (/decisions), and logged.

POST /v1/route, x-kvrouter-dry-run   Router.decide     nothing is booked or sent
GET  /decisions, /decisions/ID       DecisionRing      explained on request
GET  /decisions?blocks=true          DecisionRing      with the hashes of the prompts' blocks
--log-decisions                      DecisionRing      explained at once
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import msgspec
import structlog

from kvrouter.core.routing.decisions import Decided, DecisionRing
from kvrouter.core.routing.policy import Candidate, OverlapWeight, RouteRequest
from kvrouter.core.routing.selection import Decision, Selection, Verdict
from kvrouter.errors import BadRequestError, UnknownDecisionError
from kvrouter.frontend.operators.views import json_answer
from kvrouter.frontend.records.record import Work
from kvrouter.frontend.requests.owners import name_of
from kvrouter.relay.answer import Answer, AnswerLines
from kvrouter.relay.request import Request

log = structlog.get_logger()

DECISION_PATH = "/decisions/"
DEFAULT_LIMIT = 20
# The list is made in one piece of the event loop's time.
MOST_LISTED = 1000

_SECONDS = "seconds."


class DecisionViews:
    """Without `kept`, no decisions are kept."""

    def __init__(self, kept: DecisionRing | None, *, logs: bool) -> None:
        self._kept = kept
        self.logs = logs and kept is not None

    def preview(self, work: Work) -> Answer:
        """Where the request would go, and why. Nothing is booked or sent."""
        decision = work.router.decide(work.route, asyncio.get_running_loop().time())
        selection = work.router.modes.of(work.route.mode)
        facts = _facts(work.route, decision.now, selection) | {"dry_run": True}
        body = facts | {"model": work.router.pool.model} | _view(decision)
        return Answer(200, _encoded(body), {"x-request-id": work.id})

    async def one(self, request: Request) -> Answer:
        """GET /decisions/REQUEST_ID: its attempts and moves, oldest first. Raises UnknownDecisionError."""
        request_id = request.path_after(DECISION_PATH)
        found = self._kept.of(request_id) if self._kept is not None else []
        if not found:
            raise UnknownDecisionError(
                f"no decision about {request_id!r} is kept here: this replica keeps its last "
                f"{self._kept.capacity if self._kept is not None else 0} (--decisions); "
                "x-kvrouter-router of its answer names the replica that placed it"
            )
        explained = [self._explained(one) for one in found]
        return json_answer({"request_id": request_id, "moves": _moves(found), "decisions": explained})

    async def last(self, request: Request) -> Answer | AnswerLines:
        """GET /decisions: the newest first, without their candidates. Raises BadRequestError.

        With `blocks=true` as JSON lines, made while they are sent: a prompt can have thousands of blocks.
        """
        limit = request.query.get("limit", [str(DEFAULT_LIMIT)])[0]
        if not (limit.isascii() and limit.isdecimal()) or not 1 <= int(limit) <= MOST_LISTED:
            raise BadRequestError(
                f"limit={limit!r}: must be a whole number from 1 to {MOST_LISTED}", param="limit"
            )
        kept = self._kept.last(int(limit)) if self._kept is not None else []
        if request.in_query("blocks") == "true":
            return AnswerLines(self._with_blocks(kept))
        return json_answer({"decisions": [self._summary(one) for one in kept]})

    def log_last(self) -> None:
        """Log the last decision with every candidate's terms. Only where `logs` is set."""
        assert self._kept is not None
        (decided,) = self._kept.last(1)
        log.info("request.routed", **self._explained(decided))

    def terms_of(self, request_id: str) -> dict[str, Any]:
        """The terms of the target that the last decision for a request chose, and of the next best.

        Empty if it is not kept.
        """
        found = self._kept.of(request_id) if self._kept is not None else []
        if not found:
            return {}
        facts = _compared(found[-1].explain())
        return facts | {name: _nested(facts[name]) for name in ("terms", "next_terms") if name in facts}

    def last_terms(self) -> Callable[[], dict[str, Any]]:
        """What gives `terms_of` the last decision later, with the choice and its mode."""
        return partial(_terms, self._kept.last(1)[0]) if self._kept is not None else dict

    def _summary(self, decided: Decided) -> dict[str, Any]:
        choice = next(one for one in decided.eligible if one.target == decided.order[0])
        pair = None if decided.sharing is None else decided.sharing.pair
        return _facts(decided.request, decided.moment.now, decided.selection) | {
            "model": choice.card.model,
            "winner": str(choice.target),
            "overlap_blocks": choice.overlap_blocks,
            **({"prefill": str(pair.computes.target)} if pair is not None else {}),
            "candidates": len(decided.candidates),
            "eligible": len(decided.eligible),
        }

    def _with_blocks(self, kept: Sequence[Decided]) -> Iterator[bytes]:
        for decided in kept:
            size = decided.eligible[0].block_size or decided.eligible[0].card.block_size
            prompts = [
                {
                    "isl": prompt.isl,
                    "block_size": prompt.block_size or size,
                    "hashes": [] if prompt.is_text else [f"{hash_:016x}" for hash_ in prompt.hashes],
                }
                for prompt in decided.request.prompts
            ]
            yield _encoded(self._summary(decided) | {"prompts": prompts})
            yield b""  # a pause for other requests, see AnswerLines

    def _explained(self, decided: Decided) -> dict[str, Any]:
        facts = _facts(decided.request, decided.moment.now, decided.selection)
        # Terms from tables are computed again when they are requested; the tables have changed since.
        reads_tables = decided.selection.policy.reads_tables
        terms_of = {"terms_of": "now" if reads_tables else "then", "model": decided.eligible[0].card.model}
        return facts | terms_of | _view(decided.explain())


def _moves(decided: Sequence[Decided]) -> list[dict[str, Any]]:
    """How its stream has moved: of the tries of each move the last one counts."""
    last = {one.request.moved: one.order[0] for one in decided if one.request.moved is not None}
    return [
        {"from": str(moved.left), "to": str(target), "cause": moved.cause, "tokens": moved.tokens}
        for moved, target in last.items()
    ]


def _facts(request: RouteRequest, now: float, selection: Selection) -> dict[str, Any]:
    # Decisions carry the time of the event loop, which has no date.
    seconds_ago = asyncio.get_running_loop().time() - now
    media = {prompt.media for prompt in request.prompts if prompt.media}
    return ({"media": media.pop()} if media else {}) | {
        "request_id": request.request_id,
        "time": round(time.time() - seconds_ago, 3),
        "mode": selection.mode,
        "isl": request.isl,
        "prompt_blocks": sum(len(prompt.hashes) for prompt in request.prompts),
        "session": name_of(request.session),  # without the hash of its owner's credentials
        "parent_session": name_of(request.parent_session),
        "overlap_weight": _given(request.overlap_weight, selection.policy.overlap_weight),
        "temperature": _given(request.temperature, selection.policy.temperature),
    }


def _given(own: OverlapWeight | None, general: OverlapWeight | None) -> OverlapWeight | None:
    """The request's setting, or the operator's; None: the mode has none."""
    return general if own is None else own


def _view(decision: Decision) -> dict[str, Any]:
    judged = [one for one in decision.verdicts if not one.removed_by]
    removed = [one for one in decision.verdicts if one.removed_by]
    return {
        "winner": str(decision.target) if decision.target is not None else None,
        "order": [str(target) for target in decision.order],
        "ties": [str(target) for target in decision.ties],
        "unseen_bookings": round(decision.unseen, 3),
        "part": round(decision.part, 3),
        "candidates": [_candidate(one) | {"why_not": decision.why_not(one)} for one in judged],
        "removed": [_target(one) | {"by": one.removed_by} for one in removed],
    } | _view_of_sharing(decision)


def _view_of_sharing(decision: Decision) -> dict[str, Any]:
    """The other half of a pair, and why two workers are better than one, or one than two."""
    first, view = decision.prefill, {}
    if first is not None:
        candidates = [_candidate(one) | {"why_not": first.why_not(one)} for one in first.verdicts]
        view["prefill"] = {"winner": str(first.target), "candidates": candidates}
    return view | ({"remote": _rounded(dict(decision.remote))} if decision.remote else {})


def _terms(decided: Decided) -> dict[str, Any]:
    decision = decided.explain()
    return {"mode": decided.selection.mode, "choice": str(decision.target)} | _compared(decision)


def _compared(decision: Decision) -> dict[str, Any]:
    judged = {one.target: one for one in decision.verdicts if not one.removed_by}
    facts: dict[str, Any] = {"terms": _rounded(judged[decision.order[0]].terms), "eligible": len(judged)}
    if second := decision.next_best:
        facts |= {"next": str(second), "next_terms": _rounded(judged[second].terms)}
    if removed := Counter(one.removed_by for one in decision.verdicts if one.removed_by):
        facts["removed"] = dict(removed)
    return facts


def _rounded(terms: dict[str, float]) -> dict[str, float]:
    # JSON has neither infinity nor NaN
    return {name: round(value, 6) for name, value in terms.items() if math.isfinite(value)}


def _nested(terms: dict[str, float]) -> dict[str, Any]:
    """The terms as JSON: {"seconds.total": 0.1} becomes {"seconds": {"total": 0.1}}, which comes first."""
    # no other dot: a scorer may have a name with one
    parts = {name: value for name, value in terms.items() if name.startswith(_SECONDS)}
    others = {name: value for name, value in terms.items() if name not in parts}
    seconds = {name.removeprefix(_SECONDS): value for name, value in parts.items()}
    return {"seconds": seconds} | others if seconds else others


def _target(verdict: Verdict) -> dict[str, Any]:
    return {"worker_id": verdict.target.worker_id, "dp_rank": verdict.target.rank}


def _candidate(verdict: Verdict) -> dict[str, Any]:
    facts = _load(verdict.candidate) if verdict.candidate is not None else {}
    return _target(verdict) | facts | {"terms": _nested(verdict.terms)}


def _load(one: Candidate) -> dict[str, Any]:
    """Amounts include the request itself, except `active_blocks`, `requests`, `running` and `waiting`."""
    return {
        "overlap_blocks": one.overlap_blocks,
        "prefill_tokens": one.prefill_tokens,
        "decode_blocks": one.decode_blocks,
        "active_blocks": one.active_blocks,
        "requests": one.requests,
        "running": one.running,
        "waiting": one.waiting,
        "kv_usage": one.kv_usage,
    }


def _encoded(body: dict[str, Any]) -> bytes:
    return msgspec.json.encode(body) + b"\n"
