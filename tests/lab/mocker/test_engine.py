"""The scheduler behaves like vLLM's, and its events describe its cache exactly."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeAlias

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvrouter.errors import ConfigError
from kvrouter.lab.mocker.answers import Vocabulary
from kvrouter.lab.mocker.cache import Chain
from kvrouter.lab.mocker.engine import Engine, EngineConfig, EngineOutput, EngineRequest, speed_up
from kvrouter.lab.mocker.events import ClearedBlocks
from kvrouter.lab.mocker.hashing import token_ids
from tests.lab.mocker.conftest import Shadow

SMALL = EngineConfig(num_blocks=16, block_size=4, max_num_seqs=3, max_num_batched_tokens=12, max_model_len=48)


def request(number: int, prompt: list[int], max_tokens: int = 4, **more: str) -> EngineRequest:
    """A request with a number for its id."""
    return EngineRequest(str(number), token_ids(prompt), max_tokens, **more)  # type: ignore[arg-type]


def finish(engine: Engine) -> list[EngineOutput]:
    """Step until no request is left; every output, in order."""
    outputs: list[EngineOutput] = []
    while engine.has_work():
        outputs += engine.step().outputs
        engine.check()
    return outputs


@pytest.fixture
def engine() -> Engine:
    """Sixteen blocks of four tokens, three sequences, twelve tokens per step."""
    return Engine(SMALL)


def test_answer_has_the_requested_length(engine: Engine) -> None:
    """`max_tokens` tokens, the last of them with its reason."""
    engine.add(request(1, [1, 2, 3], max_tokens=5))

    outputs = finish(engine)

    assert [None] * 4 + ["length"] == [output.finish_reason for output in outputs]
    assert not engine.has_work()
    assert 0 == engine.kv_usage


def test_context_limits_the_answer(engine: Engine) -> None:
    """An answer ends at the end of the context."""
    engine.add(request(1, [*range(40)], max_tokens=100))

    assert 8 == len(finish(engine))


def test_answer_ends_by_itself() -> None:
    """Without a limit the end-of-sequence token ends it, unless it is ignored."""
    engine = Engine(replace(SMALL, vocabulary=Vocabulary(mean_answer_tokens=1)))
    engine.add(EngineRequest("ends", token_ids([1])))
    engine.add(EngineRequest("goes on", token_ids([1]), ignore_eos=True))

    ends = {output.id: output for output in finish(engine) if output.finish_reason}

    assert ("stop", "length") == (ends["ends"].finish_reason, ends["goes on"].finish_reason)
    assert 2 == ends["ends"].token


def test_long_prompt_is_computed_in_chunks(engine: Engine) -> None:
    """A prompt of 30 tokens needs three steps of twelve; the first token comes with the third."""
    engine.add(request(1, [*range(30)]))

    assert [0, 0, 1] == [len(engine.step().outputs) for _ in range(3)]


def test_decoding_continues_during_a_prefill(engine: Engine) -> None:
    """A long prompt takes the rest of the budget, so running answers continue."""
    engine.add(request(1, [1], max_tokens=10))
    engine.step()
    engine.add(request(2, [*range(100, 130)]))

    assert [["1"], ["1"], ["1", "2"]] == [[o.id for o in engine.step().outputs] for _ in range(3)]


def test_sequences_are_limited(engine: Engine) -> None:
    """Four requests, three places: one waits."""
    for number in range(4):
        engine.add(request(number, [number]))
    engine.step()

    assert (3, 1) == (engine.num_running, engine.num_waiting)


def test_no_request_overtakes(engine: Engine) -> None:
    """A small request does not pass a large one that does not fit."""
    engine.add(request(1, [*range(40)], max_tokens=8))
    while not engine.step().outputs:
        pass
    engine.add(request(2, [*range(100, 140)]))
    engine.add(request(3, [7]))

    engine.step()

    assert (1, 2) == (engine.num_running, engine.num_waiting)


def test_newest_is_preempted_and_resumes() -> None:
    """Without free blocks the newest request is preempted; after its restart the answer is the same."""
    engine = Engine(replace(SMALL, num_blocks=12))
    prompts = [[*range(100 * n, 100 * n + 16)] for n in (1, 2)]
    for number, prompt in enumerate(prompts):
        engine.add(request(number, prompt, max_tokens=16))

    outputs = finish(engine)

    assert engine.counters.preemptions > 0
    for number, prompt in enumerate(prompts):
        alone = Engine(SMALL)
        alone.add(request(number, prompt, max_tokens=16))
        assert [o.token for o in finish(alone)] == [o.token for o in outputs if o.id == str(number)]


def test_abort_frees_at_once(engine: Engine) -> None:
    """An aborted request holds no blocks, running or waiting; a second abort has no effect."""
    for number in range(4):
        engine.add(request(number, [number], max_tokens=40))
    engine.step()

    assert [True] * 4 == [engine.abort(str(number)) for number in range(4)]
    assert not engine.abort("0")
    engine.check()
    assert (0, False) == (engine.kv_usage, engine.has_work())


def test_reset_is_announced_by_the_next_step(engine: Engine) -> None:
    """The clear comes first in the batch of the next request; it fails while one runs."""
    engine.add(request(1, [*range(8)]))
    engine.step()
    assert not engine.reset_prefix_cache()
    finish(engine)

    assert engine.reset_prefix_cache()
    engine.add(request(2, [*range(8)]))
    step = engine.step()

    assert ClearedBlocks() == step.events[0]
    assert 0 == step.outputs[0].cached_tokens


def test_cached_prefix_saves_time(engine: Engine) -> None:
    """A hit costs less than computing it."""
    durations = []
    for number in (1, 2):
        engine.add(request(number, [*range(12)], max_tokens=1))
        durations.append(engine.step().duration_s)

    saved_s = SMALL.timing.prefill_token_s * 8
    assert pytest.approx(saved_s) == durations[0] - durations[1]


@pytest.mark.parametrize("bad", [[], [1] * 48])
def test_impossible_prompts(engine: Engine, bad: list[int]) -> None:
    """An empty prompt, or one without room for an answer, is an error."""
    with pytest.raises(ValueError, match="prompt of"):
        engine.add(request(1, bad))


def test_id_twice(engine: Engine) -> None:
    """Ids are unique."""
    engine.add(request(1, [1]))
    with pytest.raises(ValueError, match="already"):
        engine.add(request(1, [1]))


@pytest.mark.parametrize("wrong", [{"num_blocks": 2}, {"max_num_batched_tokens": 2}])
def test_impossible_config(wrong: dict[str, int]) -> None:
    """Settings under which a request could never finish are rejected with the numbers."""
    with pytest.raises(ConfigError, match=r"\d"):
        replace(SMALL, **wrong)  # type: ignore[arg-type]


# --- random histories ---


@dataclass(frozen=True)
class Add:
    """A prompt from one of a few families, so that prefixes are shared."""

    family: int
    length: int
    max_tokens: int
    salt: str | None
    lora_name: str | None
    full: bool

    def request(self, number: int) -> EngineRequest:
        """The EngineRequest."""
        prompt = token_ids(range(1000 * self.family, 1000 * self.family + self.length))
        return EngineRequest(str(number), prompt, self.max_tokens, lora_name=self.lora_name, salt=self.salt)


@dataclass(frozen=True)
class Abort:
    """Abort some request."""

    number: int


Action: TypeAlias = Add | Abort | str

adds = st.builds(
    Add,
    family=st.integers(0, 2),
    length=st.integers(1, 47),
    max_tokens=st.integers(1, 12),
    salt=st.sampled_from([None, None, "pepper"]),
    lora_name=st.sampled_from([None, None, "adapter"]),
    full=st.just(False),
)
aborts = st.builds(Abort, number=st.integers(0, 30))
steps = st.just("step")
actions = st.one_of(adds, steps, steps, steps, aborts, st.just("reset"))
configs = st.builds(
    replace,
    st.just(SMALL),
    eviction=st.sampled_from(["lru", "lfu"]),
    num_blocks=st.integers(12, 20),
    host_blocks=st.sampled_from([0, 1, 3, 40]),
    max_num_batched_tokens=st.sampled_from([3, 12, 100]),
)


def act(engine: Engine, action: Action, number: int) -> None:
    """Apply one action to an engine."""
    if isinstance(action, Add):
        engine.add(action.request(number))
    elif isinstance(action, Abort):
        engine.abort(str(action.number))
    elif action == "reset":
        engine.reset_prefix_cache()


@given(configs, st.lists(actions, max_size=60))
def test_events_describe_the_cache(
    new_shadow: Callable[[], Shadow], config: EngineConfig, history: list[Action]
) -> None:
    """After any actions the events give exactly the cache's content, and no block lacks its parent."""
    engine, shadow = Engine(config), new_shadow()

    for number, action in enumerate(history):
        act(engine, action, number)
        if action == "step" and engine.has_work():
            shadow.apply(engine.step().events)
            assert set(engine.cache.cached_hashes()) == shadow.device
            assert set(engine.cache.host) == shadow.host
        engine.check()
    finish(engine)
    assert 0 == engine.kv_usage


@given(configs, st.lists(adds, max_size=30))
def test_cached_tokens_are_predictable(
    new_shadow: Callable[[], Shadow], config: EngineConfig, history: list[Add]
) -> None:
    """One request at a time: the events predict the engine's report."""
    engine, shadow = Engine(config), new_shadow()

    for number, add in enumerate(history):
        request = add.request(number)
        hashes = Chain(request.prompt, 4, lora_name=request.lora_name, salt=request.salt).hashes
        predicted = min(shadow.depth(hashes), (add.length - 1) // 4)

        engine.add(request)
        outputs = []
        while engine.has_work():
            step = engine.step()
            shadow.apply(step.events)
            outputs += step.outputs

        assert {4 * predicted} == {output.cached_tokens for output in outputs}


@given(configs, st.lists(adds, min_size=1, max_size=12))
def test_every_request_is_served(config: EngineConfig, history: list[Add]) -> None:
    """All requests at once: each gets its whole answer, the same as alone on another engine."""
    engine = Engine(config)
    for number, add in enumerate(history):
        engine.add(add.request(number))

    outputs = finish(engine)

    for number, add in enumerate(history):
        alone = Engine(SMALL)
        alone.add(add.request(number))
        assert [o.token for o in finish(alone)] == [o.token for o in outputs if o.id == str(number)]


def test_speed_up() -> None:
    """A config with twice the speed takes half the time."""
    durations = []
    for config in (SMALL, speed_up(SMALL, 2)):
        engine = Engine(config)
        engine.add(request(1, [1, 2, 3]))
        durations.append(engine.step().duration_s)

    assert pytest.approx(2 * durations[1]) == durations[0]
