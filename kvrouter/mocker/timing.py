"""How long an engine step takes: a linear model of a transformer on one GPU.

The defaults stand for Llama-3-8B in bf16 on one H100 SXM (3.35 TB/s of memory, ~400 TFLOP/s achieved),
from first principles rather than from a benchmark:
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class StepWork:
    """What one step computes."""

    prefill_tokens: int = 0
    decode_seqs: int = 0
    context_tokens: int = 0
    """Tokens in the caches of the decoding sequences."""
    host_tokens: int = 0
    """Tokens whose blocks are copied back from host memory."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds per unit of work."""

    base_s: float = 5e-3
    """16 GB of weights read once per step."""
    prefill_token_s: float = 40e-6
    """2 x 8e9 FLOP per token."""
    decode_seq_s: float = 20e-6
    """Sampling, detokenizing and scheduling; an estimate."""
    context_token_s: float = 40e-9
    """128 KiB of KV cache read per token of context (32 layers, 8 KV heads of 128, bf16)."""
    host_token_s: float = 2.6e-6
    """128 KiB over PCIe 5 x16 at 50 GB/s."""

    def step_s(self, work: StepWork) -> float:
        """The duration of one step, in seconds."""
        return (
            self.base_s
            + self.prefill_token_s * work.prefill_tokens
            + self.decode_seq_s * work.decode_seqs
            + self.context_token_s * work.context_tokens
            + self.host_token_s * work.host_tokens
        )

    def scaled(self, speedup: float) -> Timing:
        """The same GPU, `speedup` times as fast."""
        return Timing(
            self.base_s / speedup,
            self.prefill_token_s / speedup,
            self.decode_seq_s / speedup,
            self.context_token_s / speedup,
            self.host_token_s / speedup,
        )
