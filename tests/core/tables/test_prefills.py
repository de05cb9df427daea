"""The prefill that is left on a target: first come first served, dated here, and what it teaches."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from kvrouter.core.tables.bookings import Booking, BookingTable, Service
from kvrouter.core.tables.prefill_speeds import CONTEXT_SLOPE, FEW, MOST_ERROR, PrefillSpeeds, Speed
from kvrouter.core.wire.ids import BookingKey, RouterId, Target, WorkerId
from kvrouter.core.wire.ops import PrefillSpeed

pytestmark = pytest.mark.usefixtures("core")

R1, R2 = RouterId("r1"), RouterId("r2")
T1 = Target(WorkerId("w1"))
A, B, C = BookingKey(R1, 1), BookingKey(R2, 1), BookingKey(R1, 2)


def sent(key: BookingKey, tokens: int, at: float) -> Booking:
    """A prompt of which nothing is cached."""
    return Booking(key, "req", T1, [], tokens, 0, tokens, sent_at=at)


@pytest.fixture
def active() -> BookingTable:
    """A table in which w1 got A (1,000 tokens) at 10.0, B (300, of a peer) at 10.1 and C (20) at 10.2."""
    table = BookingTable()
    table.use_block_size(16)
    table.line_up([T1])
    for key, tokens, at in ((A, 1000, 10.0), (B, 300, 10.1), (C, 20, 10.2)):
        table.book(sent(key, tokens, at))
    table.check()
    return table


def prefills(active: BookingTable) -> tuple[int, int, int, float]:
    """Prompts, head, context and beginning, from the columns."""
    active.check()
    prompts, heads, context, began = active.prefills_lined_up()
    return prompts[0], heads[0], context[0], began[0]


def test_the_first_prefill_began_when_it_was_sent(active: BookingTable) -> None:
    """Nothing was before it."""
    assert (3, 1000, 0, 10.0) == prefills(active)


def test_the_next_prefill_begins_at_a_first_byte(active: BookingTable) -> None:
    """And the finished prompt is context now, with the blocks that its answer fills."""
    active.mark_prefill_completed(A, 10.5)
    active.progress(A, 2)

    assert (2, 300, 1000 + 32, 10.5) == prefills(active)

    active.free(A, 11.0)

    assert (2, 300, 0, 10.5) == prefills(active)


def test_an_aborted_head_makes_way(active: BookingTable) -> None:
    """The next one begins; an abort further back changes nothing."""
    active.free(B, 10.3)
    assert (2, 1000, 0, 10.0) == prefills(active)

    active.free(A, 10.4)

    assert (1, 20, 0, 10.4) == prefills(active)


def test_a_prompt_may_overtake(active: BookingTable) -> None:
    """The engine then turns to the head only now."""
    active.mark_prefill_completed(C, 10.3)

    assert (2, 1000, 20, 10.3) == prefills(active)


def test_a_decode_half_is_not_in_the_line(active: BookingTable) -> None:
    """Its target computes no prompt of it: neither its booking, its first byte nor its end moves the head."""
    half, lost = BookingKey(R1, 4), BookingKey(R1, 5)
    for key in (half, lost):
        active.book(replace(sent(key, 500, 10.3), prefill_tokens=0, role="decode"))
    assert (3, 1000, 0, 10.0) == prefills(active)

    active.mark_prefill_completed(half, 10.4)
    active.free(lost, 10.5)

    assert (3, 1000, 500, 10.0) == prefills(active)
    assert active.service(A, 10.75, 0.75) == Service(T1, 1000, 0.75, 500)


def test_an_idle_target_begins_again(active: BookingTable) -> None:
    """Not at its last first byte, but when the next request is sent."""
    for key, at in ((A, 10.5), (B, 10.6), (C, 10.7)):
        active.mark_prefill_completed(key, at)

    active.book(sent(BookingKey(R1, 3), 7, 20.0))

    assert (1, 7, 1320, 20.0) == prefills(active)


def test_output_blocks_count_in_the_pools_blocks(active: BookingTable) -> None:
    """Also of loads that do not change after the pool's block size did."""
    active.mark_prefill_completed(A, 10.2)
    active.progress(A, 2)
    assert 1000 + 2 * 16 == prefills(active)[2]
    active.use_block_size(32)
    assert 1000 + 2 * 32 == prefills(active)[2]


def test_service_is_without_the_wait(active: BookingTable) -> None:
    """From the later of sending and the previous first byte; the context is what decodes meanwhile."""
    assert Service(T1, 1000, 0.5, 0) == active.service(A, 10.5, 0.5)
    active.mark_prefill_completed(A, 10.5)

    # a peer's first byte, 0.6 s after the peer sent it, heard now
    assert Service(T1, 300, 0.25, 1000) == active.service(B, 10.75, 0.6)


def test_an_unobserved_end_teaches_nothing(active: BookingTable) -> None:
    """After an abort, or an end that was only predicted, the beginning of the next prefill is unknown."""
    active.service(A, 10.5, 0.5)
    active.mark_prefill_completed(A, 10.5)
    active.free(B, 10.6)

    assert active.service(C, 10.7, 0.5) is None
    assert active.service(B, 10.7, 0.5) is None  # not booked any more


@pytest.mark.parametrize("now", [9.0, 10.0, 1e6])
def test_times_that_no_engine_takes_teach_nothing(active: BookingTable, now: float) -> None:
    """After a first byte at 10: a clock that went back, one that stands still, and a week."""
    active.service(A, 10.0, 0.5)
    active.mark_prefill_completed(A, 10.0)

    assert active.service(B, now, 1e12) is None


def speeds_after(*services: tuple[int, float, int]) -> PrefillSpeeds:
    """What was learnt from these tokens, seconds and contexts."""
    speeds = PrefillSpeeds()
    for tokens, seconds, context in services:
        speeds.learn(Service(T1, tokens, seconds, context))
    return speeds


def test_stated_speeds_count_until_enough_is_measured() -> None:
    """The mean time of those cards that state one; not a speed that no engine has."""
    speeds = PrefillSpeeds()
    assert speeds.speed.doubt

    speeds.assume([0, 10_000, 5_000, 10**9])
    assert 1.5e-4 == pytest.approx(speeds.speed.seconds_per_token)
    assert not speeds.speed.doubt

    for _ in range(FEW):
        speeds.learn(Service(T1, 1000, 0.1, 0))
    assert 1e-4 == pytest.approx(speeds.speed.seconds_per_token)
    learnt = speeds.speed
    speeds.assume([1000])
    assert learnt == speeds.speed


def test_the_speed_is_learnt() -> None:
    """100 µs a token instead of the prior's 50, next to a million tokens of context."""
    speeds = speeds_after(*[(5000, 0.5 * (1 + CONTEXT_SLOPE * 1_000_000), 1_000_000)] * 400)

    assert 1e-4 == pytest.approx(speeds.speed.seconds_per_token, rel=0.01)
    assert speeds.speed.error < 0.01
    assert not speeds.speed.doubt


def test_sums_are_right_where_parts_are_not() -> None:
    """Two prompts that end in one engine step: the first gets all the seconds, the second none."""
    speeds = speeds_after(*[(5000, 1.0, 0), (5000, 0.0, 0)] * 400)

    assert 1e-4 == pytest.approx(speeds.speed.seconds_per_token, rel=0.01)


def chats(turns: int) -> list[tuple[int, float, int]]:
    """Uncached ends of 16 to 100 tokens, at 100 µs a token and 15 ms a prompt."""
    return [(tokens, 0.015 + 1e-4 * tokens, 0) for tokens in (16, 100, 40, 70)] * (turns // 4)


def test_the_fixed_part_of_short_prompts_is_not_their_tokens() -> None:
    """What long prompts taught is still known after thousands of nearly cached ones."""
    speeds = speeds_after(*[(5000, 0.5, 0)] * 20, *chats(8000))

    assert 1e-4 == pytest.approx(speeds.speed.seconds_per_token)
    assert 0.015 == pytest.approx(speeds.speed.fixed_s)
    assert speeds.speed.error < 0.001


def test_a_queue_of_short_prompts_takes_what_such_prompts_took() -> None:
    """Also where two end in one engine step, and where an engine lets each wait for a seat."""
    pairs = [(50, 0.02, 0), (50, 0.0, 0)] * 2000
    speed = speeds_after(*[(5000, 0.5, 0)] * 20, *pairs).speed

    assert 0.01 == pytest.approx(speed.fixed_s + 50 * speed.seconds_per_token, rel=0.01)


def test_without_long_prompts_all_seconds_are_those_of_tokens() -> None:
    """Where no more than a few were ever measured, none tells the two parts apart."""
    speeds = speeds_after(*[(5000, 0.5, 0)] * (FEW - 1), *chats(8000))
    mean_s, mean_tokens = 0.015 + 1e-4 * 56.5, 56.5

    assert mean_s / mean_tokens == pytest.approx(speeds.speed.seconds_per_token, rel=0.01)
    assert 0 == speeds.speed.fixed_s


def test_long_prompts_take_no_fixed_part() -> None:
    """Alone they are the ratio that they always were."""
    speed = speeds_after(*[(5000, 0.52, 0), (700, 0.09, 0)] * 400).speed

    assert 0.61 / 5700 == pytest.approx(speed.seconds_per_token, rel=0.01)
    assert 0 == pytest.approx(speed.fixed_s, abs=1e-12)


def test_engines_that_became_faster_show_in_short_prompts() -> None:
    """A token takes no longer than what the latest prompts leave for it."""
    speed = speeds_after(*[(5000, 5.0, 0)] * 20, *[(100, 0.02, 0)] * 2000).speed

    assert 2e-4 == pytest.approx(speed.seconds_per_token, rel=0.01)
    assert 0 == speed.fixed_s


def test_it_is_doubted() -> None:
    """After few samples, and while predictions are off by more than what is measured."""
    assert "0 of 8" in PrefillSpeeds().speed.doubt
    assert f"{FEW - 1} of 8" in speeds_after(*[(5000, 0.25, 0)] * (FEW - 1)).speed.doubt
    wild = speeds_after(*[(5000, 0.0, 0), (2000, 0.0, 0), (100, 0.6, 0)] * 400)
    assert wild.speed.error > MOST_ERROR
    assert "off by" in wild.speed.doubt


def test_a_joiner_begins_with_what_a_peer_learnt() -> None:
    """Unless it knows more itself."""
    taught, joiner = speeds_after(*[(5000, 0.5, 0)] * 300), PrefillSpeeds()
    op = taught.op()
    assert op is not None

    joiner.adopt(op)

    assert joiner.speed.samples == taught.speed.samples
    assert joiner.speed.seconds_per_token == pytest.approx(taught.speed.seconds_per_token, rel=1e-6)
    longer = speeds_after(*[(5000, 0.25, 0)] * 301)
    before = longer.speed
    longer.adopt(op)
    assert before == longer.speed
    assert PrefillSpeeds().op() is None


def test_a_joiner_knows_the_fixed_part() -> None:
    """And goes on from there as its peer does."""
    taught, joiner = speeds_after(*[(5000, 0.5, 0)] * 20, *chats(4000)), PrefillSpeeds()
    op = taught.op()
    assert op is not None

    joiner.adopt(op)
    for speeds in (taught, joiner):
        speeds.learn(Service(T1, 3000, 0.4, 0))

    # as near as whole microseconds and tokens are
    assert joiner.speed.fixed_s == pytest.approx(taught.speed.fixed_s, rel=1e-3)
    assert joiner.speed.seconds_per_token == pytest.approx(taught.speed.seconds_per_token, rel=1e-4)


def test_an_older_peer_tells_no_long_prompts_apart() -> None:
    """A joiner then has the ratio over all, until it has measured long ones itself."""
    joiner = PrefillSpeeds()

    joiner.adopt(PrefillSpeed(4_000_000, 10_000, 0, 500))
    assert (4e-4, 0.0) == (joiner.speed.seconds_per_token, joiner.speed.fixed_s)
    for tokens, seconds, context in [(5000, 0.5, 0)] * FEW + chats(2000):
        joiner.learn(Service(T1, tokens, seconds, context))

    assert 1e-4 == pytest.approx(joiner.speed.seconds_per_token)
    assert 0.015 == pytest.approx(joiner.speed.fixed_s, rel=0.01)


def test_long_prompts_that_no_engine_has_are_not_adopted() -> None:
    """The rest of what the peer sent is."""
    joiner = PrefillSpeeds()

    joiner.adopt(PrefillSpeed(4_000_000, 10_000, 0, 500, 1, 1_000_000, 20))

    assert (4e-4, 0.0) == (joiner.speed.seconds_per_token, joiner.speed.fixed_s)


@pytest.mark.parametrize("us", [0, 1, 1 << 48])
def test_a_speed_that_no_engine_has_is_not_adopted(us: int) -> None:
    """Less than 0.1 µs for a token, or more than a second."""
    joiner = PrefillSpeeds()

    joiner.adopt(PrefillSpeed(us, 1_000_000, 0, 500))

    assert Speed() == joiner.speed
