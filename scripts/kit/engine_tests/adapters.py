"""LoRA adapters with random weights for the tiny model, in the form that vLLM loads.

    adapter_model.safetensors:  u64 length of the JSON | JSON {name: dtype, shape, offsets} | floats

Source: https://github.com/huggingface/safetensors, "Format".
"""

from __future__ import annotations

import json
import random
import struct
from array import array
from pathlib import Path
from typing import Any

RANK = 8
_PROJECTIONS = ("q_proj", "v_proj")
_SPREAD = 0.1


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
    (directory / "adapter_model.safetensors").write_bytes(_safetensors(shapes, random.Random(seed)))
    (directory / "adapter_config.json").write_text(json.dumps(_config()), "utf-8")


def _safetensors(shapes: dict[str, tuple[int, int]], rng: random.Random) -> bytes:
    head: dict[str, Any] = {}
    weights = array("f")
    for name, (rows, columns) in shapes.items():
        start = len(weights) * weights.itemsize
        weights.extend(rng.gauss(0, _SPREAD) for _ in range(rows * columns))
        end = len(weights) * weights.itemsize
        head[name] = {"dtype": "F32", "shape": [rows, columns], "data_offsets": [start, end]}
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
