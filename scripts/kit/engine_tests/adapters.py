"""LoRA adapters and weights for the tiny model, random, in the form that vLLM loads.

    adapter_model.safetensors:  u64 length of the JSON | JSON {name: dtype, shape, offsets} | floats

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import math
import random
import struct
from array import array
from collections.abc import Mapping
from pathlib import Path
from typing import Any

RANK = 8
_PROJECTIONS = ("q_proj", "v_proj")
_SPREAD, _WEIGHT_SPREAD = 0.1, 0.35


def write_adapter(directory: Path, model_path: Path, seed: int) -> None:
    """Fill `directory` with an adapter of rank 8 for the query and value projections of the model."""
    directory.mkdir(parents=True, exist_ok=True)
    model = json.loads((model_path / "config.json").read_text("utf-8"))
    width, layers = model["hidden_size"], model["num_hidden_layers"]
    shapes = {
        f"base_model.model.model.layers.{layer}.self_attn.{projection}.lora_{half}.weight": shape
        for layer in range(layers)
        for projection in _PROJECTIONS
        for half, shape in (("A", (RANK, width)), ("B", (width, RANK)))
    }
    (directory / "adapter_model.safetensors").write_bytes(_safetensors(shapes, random.Random(seed), _SPREAD))
    (directory / "adapter_config.json").write_text(json.dumps(_config()), "utf-8")


def write_weights(model_path: Path, seed: int) -> None:
    """Weights for the tiny model: with vLLM's dummy ones it answers one token again and again."""
    model = json.loads((model_path / "config.json").read_text("utf-8"))
    width, inner, words = model["hidden_size"], model["intermediate_size"], model["vocab_size"]
    heads = model["num_key_value_heads"] * model["head_dim"]
    rows_of = {"q": width, "k": heads, "v": heads}
    layer = {
        **{f"self_attn.{name}_proj.weight": (rows, width) for name, rows in rows_of.items()},
        **{f"self_attn.{name}_proj.bias": (rows,) for name, rows in rows_of.items()},
        "self_attn.o_proj.weight": (width, width),
        "mlp.gate_proj.weight": (inner, width),
        "mlp.up_proj.weight": (inner, width),
        "mlp.down_proj.weight": (width, inner),
        "input_layernorm.weight": (width,),
        "post_attention_layernorm.weight": (width,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        f"model.layers.{number}.{name}": shape
        for number in range(model["num_hidden_layers"])
        for name, shape in layer.items()
    }
    shapes |= {"model.embed_tokens.weight": (words, width), "lm_head.weight": (words, width)}
    shapes |= {"model.norm.weight": (width,)}
    (model_path / "model.safetensors").write_bytes(_safetensors(shapes, random.Random(seed), _WEIGHT_SPREAD))


def _safetensors(shapes: Mapping[str, tuple[int, ...]], rng: random.Random, spread: float) -> bytes:
    """Norms are 1."""
    head: dict[str, Any] = {}
    weights = array("f")
    for name, shape in shapes.items():
        start = len(weights) * weights.itemsize
        count = math.prod(shape)
        weights.extend([1.0] * count if "norm" in name else (rng.gauss(0, spread) for _ in range(count)))
        end = len(weights) * weights.itemsize
        head[name] = {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}
    text = json.dumps(head).encode()
    return struct.pack("<Q", len(text)) + text + weights.tobytes()


def _config() -> dict[str, Any]:
    return {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": list(_PROJECTIONS),
        "base_model_name_or_path": "tiny",
        "fan_in_fan_out": False,
        "inference_mode": True,
        "modules_to_save": None,
    }
