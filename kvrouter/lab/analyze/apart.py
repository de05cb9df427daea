"""Whether prefill and decode apart would pay, calculated from the rate and the lengths of requests.

    busy    = rate · uncached tokens · seconds a token / engines       share of their time that prompts take
    k       = rate · answer · (sequence + context · tokens)            what decoding sequences add to steps
    whole     seconds between tokens = base / (1 − busy − k / engines)
    xP + yD                            base / (1 − k / y)               where busy · engines / x <= 0.9

An engine's step takes `base`, the prompt tokens, and a part for each decoding sequence. There are as many
sequences as answers begin while one is generated. Queues are not calculated: that is what the simulator does.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from kvrouter.errors import counted
from kvrouter.lab.analyze.analysis import Analysis
from kvrouter.lab.simulate.split import KV_BYTES_PER_TOKEN
from kvrouter.lab.simulate.step_model import StepModel

# Above it prefill engines make first tokens wait. A little more is survived: the router's rule then leaves
# more prompts to decode engines (docs/simulate.md).
MOST_BUSY = 0.9
# Of a wire: at a half, reads wait for each other so long that goodput is half (docs/simulate.md).
MOST_SENT = 0.3
# The share of the time between tokens that must be gained: first tokens come later, and pairs can fail.
LEAST_GAIN = 0.2


@dataclass(frozen=True, slots=True)
class Apart:
    """The fewest prefill engines, and what they would change. Times between tokens are means."""

    busy: float
    """The share of their time that whole engines would compute prompts."""
    whole_s: float
    """Seconds between tokens; infinite: there are too few engines."""
    prefill: int
    decode: int
    """0: no engine is left for answers."""
    prefill_busy: float
    apart_s: float
    gbps: float
    """What the wire of each engine must carry."""
    answer_tokens: float
    kv_tokens: float
    """What answers in progress hold in all decode engines together."""
    room_tokens: int

    @property
    def has_room(self) -> bool:
        return self.kv_tokens <= self.room_tokens

    @property
    def pays(self) -> bool:
        return self.has_room and self.apart_s <= (1 - LEAST_GAIN) * self.whole_s and self.apart_s < math.inf


def apart_of(found: Analysis, model: StepModel, pace: float) -> Apart | None:
    """None if the rate or the length of answers is unknown."""
    if found.output is None or not found.span_s:
        return None
    engines, rate = found.fleet.workers, pace * found.requests / found.span_s
    prompt, answer = found.input.mean, found.output.mean
    busy = rate * prompt * (1 - found.rates.perfect) * model.prefill_token_s / engines
    tokens = prompt + answer / 2
    k = rate * answer * (model.decode_seq_s + model.context_token_s * tokens)
    prefill = max(1, math.ceil(busy * engines / MOST_BUSY))
    decode = max(0, engines - prefill)
    apart_s = _between_s(model, k / decode) if decode else math.inf
    return Apart(
        busy=busy,
        whole_s=_between_s(model, busy + k / engines),
        prefill=prefill,
        decode=decode,
        prefill_busy=busy * engines / prefill,
        apart_s=apart_s,
        gbps=rate * prompt * 8 * KV_BYTES_PER_TOKEN / 1e9 / (MOST_SENT * max(1, min(prefill, decode))),
        answer_tokens=answer,
        kv_tokens=rate * answer * apart_s * (prompt + answer),
        room_tokens=decode * found.fleet.blocks_each * found.fleet.block_size,
    )


def _between_s(model: StepModel, taken: float) -> float:
    """Seconds between tokens, with that share of the time taken by other things than `base`."""
    return model.base_s / (1 - taken) if taken < 1 else math.inf


def sentences(found: Analysis, apart: Apart | None, model: StepModel) -> Iterator[str]:
    """What to do, with the figures that say so; then what these assume."""
    if apart is None:
        yield (
            "Whether it would pay is unknown without the rate of requests and the length of answers"
            " (--live: give --output-tokens N)."
        )
        return
    yield _sentence(apart, found.fleet.workers)
    if not apart.decode:
        return
    kv, busy = f"{KV_BYTES_PER_TOKEN // 1024} KB of KV a token", f"{apart.prefill_busy:.0%}"
    yield (
        f"Assumed: {1e6 * model.prefill_token_s:.0f} µs a prompt token, {1000 * model.base_s:g} ms a step,"
        f" {found.rates.perfect:.0%} of the prompt tokens cached (perfect placement), prefill engines {busy}"
        f" busy ({MOST_BUSY:.0%} at most). Each engine's wire must carry {apart.gbps:.0f} Gb/s with {kv}."
        " Queues are not calculated: kvrouter simulate does, with the same requests and engines and"
        f" --workers {found.fleet.workers} --prefill-workers {apart.prefill} --decode-workers {apart.decode}"
    )


def _sentence(apart: Apart, engines: int) -> str:
    ratio, whole, split = f"{apart.prefill}P+{apart.decode}D", _every(apart.whole_s), _every(apart.apart_s)
    prompts = f"prompts take {apart.busy:.0%} of the time of {counted(engines, 'whole engine')}"
    if apart.apart_s == math.inf:
        return f"Stay whole: {prompts}; apart this rate needs more than {engines}."
    if not apart.has_room:
        room, held = f"{apart.room_tokens:,} tokens", f"{apart.kv_tokens:,.0f}"
        return f"Stay whole: as {ratio} the decode engines have room for {room}, and requests hold {held}."
    if not apart.pays:
        return f"Stay whole: {prompts}, and a token comes {whole}; as {ratio} {split}."
    if apart.whole_s == math.inf:
        return f"Split as {ratio}: {prompts}, too much for this rate; apart a token comes {split}."
    less_s = apart.answer_tokens * (apart.whole_s - apart.apart_s)
    return (
        f"Split as {ratio} if tokens must come faster than {whole}: {prompts}. Apart a token comes {split},"
        f" so an answer of {apart.answer_tokens:,.0f} tokens takes {less_s:.1f} s less."
        " First tokens come no sooner."
    )


def _every(seconds: float) -> str:
    return f"every {1000 * seconds:.1f} ms"
