"""Mode kv: decay of the overlap credit and weight on active requests, both off by default."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrouter.core.routing.policy import Candidate, RouteRequest
from kvrouter.policies import PolicySettings, new_policy
from kvrouter.policies.kv import Kv
from tests.policies.tables import ISL, REQUEST, candidate, columns, moment, picked


def costs(policy: Kv, candidates: list[Candidate]) -> list[float]:
    """What each of them costs with weight 1."""
    return policy.costs(REQUEST, columns(candidates), moment()).each


def test_defaults_are_the_published_formula() -> None:
    """With both at 0, overlap 2/5/8 and active blocks 10/7/9 cost 28, 22 and 21."""
    candidates = [
        candidate("w1", overlap=2, active=10),
        candidate("w2", overlap=5, active=7),
        candidate("w3", overlap=8, active=9),
    ]

    assert [28, 22, 21] == costs(Kv(), candidates)
    assert [28, 22, 21] == [row["cost"] for row in Kv().terms(REQUEST, columns(candidates), moment())]
    assert ["w3"] == picked(Kv(), candidates)


def test_decay_halves_the_credit_at_one_prompt_of_excess() -> None:
    """With one prompt more charged than on the least charged target, 8 blocks count as 4."""
    cached, idle = candidate("w1", overlap=8, charged=ISL), candidate("w2")

    assert [10 + 2 + 10, 20] == costs(Kv(), [cached, idle])
    assert [10 + 2 + 4 + 10, 20] == costs(Kv(overlap_decay=1.0), [cached, idle])


@pytest.mark.parametrize(
    ("decay", "excess", "kept"), [(1.0, 0, 8.0), (1.0, 3, 2.0), (2.0, 1, 8 / 3), (0.5, 2, 4.0)]
)
def test_decay_formula(decay: float, excess: int, kept: float) -> None:
    """An overlap of 8 blocks counts as 8 / (1 + decay * excess)."""
    cached = candidate("w1", overlap=8, charged=excess * ISL)

    [plain, _] = costs(Kv(), [cached, candidate("w2")])
    [decayed, _] = costs(Kv(overlap_decay=decay), [cached, candidate("w2")])

    assert pytest.approx(8 - kept) == decayed - plain


def test_decay_is_measured_from_the_least_charged() -> None:
    """Tokens charged on every target are not an excess."""
    both = [candidate("w1", overlap=8, charged=5 * ISL), candidate("w2", charged=5 * ISL)]

    assert costs(Kv(), both) == costs(Kv(overlap_decay=1.0), both)


def test_decay_moves_the_choice() -> None:
    """With decay a busy target loses the request to an idle one sooner."""
    candidates = [candidate("w1", overlap=8, charged=7 * 16), candidate("w2")]

    assert ["w1"] == picked(Kv(), candidates)
    assert ["w2"] == picked(Kv(overlap_decay=1.0), candidates)


def test_request_weight_is_blocks_per_request() -> None:
    """Three requests in flight at weight 2 cost six blocks."""
    candidates = [candidate("w1", requests=3), candidate("w2", active=5)]

    assert [20 + 6, 25] == costs(Kv(request_weight=2.0), candidates)
    assert ["w1"] == picked(Kv(), candidates)
    assert ["w2"] == picked(Kv(request_weight=2.0), candidates)


def test_weight_comes_from_request_then_settings_then_mode() -> None:
    """The mode's default is auto, which is 8 as long as nothing is known of prefill times."""
    candidates = [candidate("w1")]
    cold = replace(moment(), doubt="nothing measured")

    def weight(request: RouteRequest, setting: float | None) -> float:
        policy = new_policy("kv", PolicySettings(overlap_weight=setting))
        return policy.terms(request, columns(candidates), cold)[0]["overlap_weight"]

    own = RouteRequest("req", REQUEST.prompts, overlap_weight=0.0)
    assert (8.0, 3.0, 0.0) == (weight(REQUEST, None), weight(REQUEST, 3.0), weight(own, 3.0))
