"""The order of batches, without sockets."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.worker.zmq import ordering as engine_stream
from kvrouter.worker.zmq.ordering import (
    HELD_BATCHES,
    MAX_ATTEMPTS,
    Action,
    Apply,
    EngineStream,
    LostBatches,
    Numbered,
    Restarted,
    Step,
    digest_of,
)
from tests.long import examples


def batch(seq: int, life: str = "a") -> Numbered:
    """A batch of one life of the engine."""
    return seq, f"{life}{seq}".encode()


def batches(first: int, end: int, life: str = "a") -> list[Numbered]:
    """The batches [first, end) of one life."""
    return [batch(seq, life) for seq in range(first, end)]


def applied(step: Step) -> list[str]:
    """A short form of a step's actions: payloads, `Restarted`, `LostBatches`."""
    return [
        action.payload.decode() if isinstance(action, Apply) else type(action).__name__
        for action in step.actions
    ]


@pytest.fixture
def stream() -> EngineStream:
    """A stream that has applied batches 0 and 1."""
    stream = EngineStream(can_replay=True)
    stream.begin()
    stream.replayed(0, batches(0, 2))
    return stream


@pytest.fixture
def deaf() -> EngineStream:
    """A stream without a replay endpoint."""
    stream = EngineStream(can_replay=False)
    stream.begin()
    return stream


def test_begin() -> None:
    """It begins with an empty table and requests everything; live batches wait for the answer."""
    stream = EngineStream(can_replay=True)

    begun = stream.begin()
    live = stream.receive(*batch(2))
    answer = stream.replayed(0, batches(0, 3))

    assert Step([Restarted()], 0) == begun
    assert [] == applied(live)
    assert ["a0", "a1", "a2"] == applied(answer)
    assert stream.is_complete


def test_begin_with_a_new_engine() -> None:
    """An engine that has sent no batch yet answers none: its history is complete."""
    stream = EngineStream(can_replay=True)
    stream.begin()

    assert [] == applied(stream.replayed(0, []))
    assert stream.is_complete
    assert ["a0"] == applied(stream.receive(*batch(0)))


def test_begin_too_late() -> None:
    """If the engine's buffer no longer reaches back to 0, history is lost."""
    stream = EngineStream(can_replay=True)
    stream.begin()

    assert ["LostBatches", "a7", "a8"] == applied(stream.replayed(0, batches(7, 9)))
    assert not stream.is_complete
    assert ["a9"] == applied(stream.receive(*batch(9)))


def test_in_order(stream: EngineStream) -> None:
    """The next batch is applied at once."""
    assert ["a2"] == applied(stream.receive(*batch(2)))


def test_gap(stream: EngineStream) -> None:
    """After a gap the replay starts at the last applied batch, which proves continuity."""
    asked = stream.receive(*batch(4))
    stream.receive(*batch(5))

    answer = stream.replayed(1, batches(1, 5))

    assert Step([], 1) == asked
    assert ["a2", "a3", "a4", "a5"] == applied(answer)
    assert not stream.is_recovering


def test_repeats(stream: EngineStream) -> None:
    """A batch that was replayed and then arrives live is applied once."""
    assert [] == applied(stream.receive(*batch(1)))


def test_gap_beyond_the_buffer(stream: EngineStream) -> None:
    """A gap that the engine's buffer no longer covers is lost history."""
    stream.receive(*batch(9))

    assert ["LostBatches", "a8", "a9"] == applied(stream.replayed(1, batches(8, 10)))
    assert not stream.is_complete


def test_restart(stream: EngineStream) -> None:
    """Batch 0 with another content means a new engine process: cleared, then its batches."""
    assert ["Restarted", "b0"] == applied(stream.receive(*batch(0, "b")))
    assert ["b1"] == applied(stream.receive(*batch(1, "b")))
    assert stream.is_complete


def test_restart_with_lost_head(stream: EngineStream) -> None:
    """If the new process' first batches were missed they are replayed."""
    step = stream.receive(*batch(1, "b"))
    answer = stream.replayed(0, batches(0, 2, "b"))

    assert (["Restarted"], 0) == (applied(step), step.replay_from)
    assert ["b0", "b1"] == applied(answer)


def test_restart_behind_a_gap(stream: EngineStream) -> None:
    """A gap may hide a restart: the replayed batch differs from the one applied."""
    stream.receive(*batch(6, "b"))

    step = stream.replayed(1, batches(1, 7, "b"))
    answer = stream.replayed(0, batches(0, 7, "b"))

    assert (["Restarted"], 0) == (applied(step), step.replay_from)
    assert [f"b{seq}" for seq in range(7)] == applied(answer)


def test_verify(stream: EngineStream) -> None:
    """In quiet times the last batch is requested again; an unchanged one has no effect."""
    assert 1 == stream.verify().replay_from
    assert [] == applied(stream.replayed(1, batches(1, 2)))
    assert ["a2"] == applied(stream.receive(*batch(2)))


def test_verify_finds_a_lost_tail(stream: EngineStream) -> None:
    """Batches lost at the end are found although no later one arrives."""
    stream.verify()

    assert ["a2", "a3"] == applied(stream.replayed(1, batches(1, 4)))


def test_verify_finds_a_silent_restart(stream: EngineStream) -> None:
    """An engine that no longer has the batch has restarted."""
    stream.verify()

    step = stream.replayed(1, [])

    assert (["Restarted"], 0) == (applied(step), step.replay_from)
    assert [] == applied(stream.replayed(0, []))
    assert stream.is_complete


def test_no_answer(stream: EngineStream) -> None:
    """A replay without an answer is requested again a few times, then the gap is given up."""
    step = stream.receive(*batch(4))
    for _ in range(MAX_ATTEMPTS):
        if step.replay_from is not None:
            step = stream.replay_failed(step.replay_from)

    assert ["LostBatches", "a4"] == applied(step)
    assert not stream.is_complete


def test_no_answer_to_verify(stream: EngineStream) -> None:
    """A request without an answer in quiet times loses nothing."""
    asked = stream.verify().replay_from
    assert asked is not None
    stream.receive(*batch(2))
    steps = [stream.replay_failed(asked) for _ in range(MAX_ATTEMPTS)]

    assert ["a2"] == applied(steps[-1])
    assert stream.is_complete


def test_answers_that_do_not_help(stream: EngineStream) -> None:
    """If replays never contain the missing batches, the gap is given up."""
    for seq in range(4, 4 + MAX_ATTEMPTS):
        asked = stream.receive(*batch(seq)).replay_from
        assert asked is not None
        assert [] == applied(stream.replayed(asked, batches(1, 2)))

    assert ["LostBatches", "a9"] == applied(stream.receive(*batch(9)))


def test_received_before_asking() -> None:
    """A batch received before a request is in its answer, or of a former life: it is not applied."""
    stream = EngineStream(can_replay=True)
    stream.begin()
    stream.replayed(0, [])

    asked = stream.receive(*batch(1, "old"))

    assert 0 == asked.replay_from
    assert ["new0"] == applied(stream.replayed(0, batches(0, 1, "new")))


def test_late_answer(stream: EngineStream) -> None:
    """An answer to a request from before a new beginning is ignored."""
    stream.receive(*batch(4))
    stream.begin()

    assert Step() == stream.replayed(1, batches(1, 5))
    assert Step() == stream.replay_failed(1)
    assert stream.is_recovering


def test_without_replay(deaf: EngineStream) -> None:
    """Without a replay endpoint the first batch received begins the history; a gap is lost history."""
    assert ["a3"] == applied(deaf.receive(*batch(3)))
    assert not deaf.is_complete
    assert ["LostBatches", "a7"] == applied(deaf.receive(*batch(7)))
    assert Step() == deaf.verify()


def test_without_replay_from_zero(deaf: EngineStream) -> None:
    """A live batch 0 is a complete history without a replay."""
    deaf.receive(*batch(0))

    assert deaf.is_complete


def test_held_batches_are_bounded() -> None:
    """Beyond the limit the oldest held batch is dropped, and requested again later."""
    stream = EngineStream(can_replay=True)
    stream.begin()
    for number in range(HELD_BATCHES + 1):
        stream.receive(*batch(number))

    assert 0 == stream.replayed(0, []).replay_from


def test_held_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of waiting live batches only the newest stay, up to a limit in bytes; the others are a gap."""
    monkeypatch.setattr(engine_stream, "HELD_BYTES", 100)
    stream = EngineStream(can_replay=True)
    stream.begin()
    for number in range(1000):
        stream.receive(number, b"%010d" % number)

    step = stream.replayed(0, [(0, b"%010d" % 0)])
    assert 0 == step.replay_from
    assert [f"{0:010d}"] == applied(step)
    step = stream.replayed(0, [(number, b"%010d" % number) for number in range(1000)])
    assert [f"{number:010d}" for number in range(1, 1000)] == applied(step)


def resumed(*, was_complete: bool = True) -> EngineStream:
    """A stream that continues after batch 4 of a former agent."""
    stream = EngineStream(can_replay=True)
    seq, payload = batch(4)
    assert Step((), 4) == stream.resume(seq, digest_of(payload), was_complete=was_complete)
    return stream


@pytest.mark.parametrize("was_complete", [True, False])
def test_resume(was_complete: bool) -> None:
    """The former table is used once its last batch has come back unchanged."""
    stream = resumed(was_complete=was_complete)
    assert stream.is_beginning
    assert [] == applied(stream.receive(*batch(6)))

    step = stream.replayed(4, batches(4, 7))

    assert ["Continued", "a5", "a6"] == applied(step)
    assert (was_complete, False) == (stream.is_complete, stream.is_beginning)


def test_resume_when_nothing_happened() -> None:
    """The last batch alone is proof enough."""
    assert ["Continued"] == applied(resumed().replayed(4, batches(4, 5)))


@pytest.mark.parametrize("answer", [[], batches(4, 6, "b")])
def test_resume_with_another_engine(answer: list[Numbered]) -> None:
    """Another batch of that number, or none: the engine has restarted, and its history is read."""
    stream = resumed()

    step = stream.replayed(4, answer)

    assert (["Restarted"], 0) == (applied(step), step.replay_from)
    assert stream.is_beginning
    assert ["b0", "b1"] == applied(stream.replayed(0, batches(0, 2, "b")))
    assert stream.is_complete


def test_resume_too_late() -> None:
    """If the engine no longer has the batch, its history is lost."""
    stream = resumed()

    assert ["LostBatches", "a7"] == applied(stream.replayed(4, batches(7, 8)))
    assert (False, False) == (stream.is_complete, stream.is_beginning)


def test_resume_unanswered() -> None:
    """Without proof the former table is not used."""
    stream = resumed()
    stream.receive(*batch(5))
    for _ in range(MAX_ATTEMPTS):
        step = stream.replay_failed(4)

    assert ["LostBatches", "a5"] == applied(step)
    assert not stream.is_complete


def test_resume_without_replay(deaf: EngineStream) -> None:
    """Without a replay endpoint nothing can be proven."""
    assert ["Restarted"] == applied(deaf.resume(4, b"", was_complete=True))
    assert ["a5"] == applied(deaf.receive(*batch(5)))
    assert not deaf.is_complete


class Engine:
    """An engine that can restart, a wire that can lose live batches, and the stream that receives them."""

    def __init__(self) -> None:
        self.stream = EngineStream(can_replay=True)
        self.actions: list[Action] = []
        self.asked: int | None = None
        self.life = 0
        self.sent: list[Numbered] = []
        self.hear(self.stream.begin())

    def hear(self, step: Step) -> None:
        self.actions += step.actions
        self.asked = step.replay_from if step.replay_from is not None else self.asked

    def restart(self) -> None:
        self.life += 1
        self.sent = []

    def send(self, *, is_received: bool) -> None:
        self.sent.append(batch(len(self.sent), f"{self.life}."))
        is_first = (
            self.life > 0 and len(self.sent) == 1
        )  # if it is missed, later ones could look like a continuation
        if is_received or is_first:
            self.hear(self.stream.receive(*self.sent[-1]))

    def answer(self) -> None:
        asked, self.asked = self.asked, None
        if asked is not None:
            self.hear(self.stream.replayed(asked, self.sent[asked:]))

    def settle(self) -> None:
        """Answer until no replay is requested and the last batch is known."""
        for _ in range(8):
            if self.asked is None:
                self.hear(self.stream.verify())
            self.answer()


@examples(300)
@given(
    st.lists(st.sampled_from(["received", "received", "missed", "answer", "verify", "restart"]), max_size=40)
)
def test_any_loss(history: list[str]) -> None:
    """With any loss and any restarts, the engine's present life is applied in order."""
    engine = Engine()

    for step in history:
        if step == "restart":
            engine.restart()
        elif step == "answer":
            engine.answer()
        elif step == "verify":
            engine.hear(engine.stream.verify())
        else:
            engine.send(is_received=step == "received")
    engine.settle()

    last_clear = max(i for i, action in enumerate(engine.actions) if not isinstance(action, Apply))
    assert not any(isinstance(action, LostBatches) for action in engine.actions)
    assert [Apply(*sent) for sent in engine.sent] == engine.actions[last_clear + 1 :]
