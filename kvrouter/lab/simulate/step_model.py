"""How long a step of an engine takes, and in which order an engine serves: the presets of `--timing`."""

from __future__ import annotations

from dataclasses import dataclass, replace

FIRST_COME = "first-come"
SHORTEST = "shortest"
ORDERS = (FIRST_COME, SHORTEST)


@dataclass(frozen=True, slots=True)
class StepModel:
    """One engine: chunked prefill with a budget of tokens per step, decodes first.

    A step takes base_s + prefill_token_s per prompt token + decode_seq_s per decoding sequence +
    context_token_s per token of their context, divided by `speed`.
    """

    base_s: float
    prefill_token_s: float
    decode_seq_s: float
    context_token_s: float
    step_tokens: int
    max_num_seqs: int = 128
    block_size: int = 512
    speed: float = 1.0
    order: str = FIRST_COME
    """Which prompt of the queue is next: the first, or the shortest."""
    parallel: int = 1
    """Prompts in prefill at the same time; they share the budget of a step evenly."""

    def at_speed(self, factor: float) -> StepModel:
        """The same engine, that many times as fast."""
        return replace(self, speed=self.speed * factor)

    def served(self, order: str, parallel: int) -> StepModel:
        """The same engine with another order of prompts."""
        return replace(self, order=order, parallel=parallel)


REFERENCE = StepModel(6e-3, 50e-6, 20e-6, 40e-9, step_tokens=1024)
LARGE_STEPS = StepModel(12e-3, 20e-6, 20e-6, 40e-9, step_tokens=8192)
# The mocker's times: Llama-3-8B on an H100 (kvrouter/lab/mocker/engine.py).
H100 = StepModel(5e-3, 40e-6, 20e-6, 40e-9, step_tokens=8192, max_num_seqs=64)

STEP_MODELS = {"reference": REFERENCE, "large-steps": LARGE_STEPS, "h100": H100}
