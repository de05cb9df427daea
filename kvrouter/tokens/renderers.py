"""Models whose chats engines write by a program of their own, not by the chat template of the directory.

Source: vLLM 0.33, which chooses it by the architecture and the tokenizer's files (config/model.py,
tokenizers/registry.py).
"""

from __future__ import annotations

from pathlib import Path

import msgspec

# A directory may have a chat template all the same, for other engines.
_PROGRAMS = {
    "DeepseekV32ForCausalLM": "deepseek_v32",
    "DeepseekV4ForCausalLM": "deepseek_v4",
    "DeepseekV4ForConditionalGeneration": "deepseek_v4",
    "DeepseekV41ForCausalLM": "deepseek_v41",
    "InklingForCausalLM": "inkling",
    "InklingForConditionalGeneration": "inkling",
    "KimiK3ForConditionalGeneration": "kimi_k3",
}
_MISTRAL_FILES = ("tekken.json", "tokenizer.model.v*")


class _Config(msgspec.Struct):
    architectures: list[str] | None = None
    model_type: str | None = None


def own_renderer(model_path: Path) -> str:
    """The tokenizer mode of vLLM that writes the chats of a model directory; empty: its template does."""
    if any(file for pattern in _MISTRAL_FILES for file in model_path.glob(pattern)):
        return "mistral"
    config = _read_config(model_path)
    return next((_PROGRAMS[name] for name in config.architectures or () if name in _PROGRAMS), "")


def writes_harmony(model_path: Path) -> bool:
    """Whether engines write the chats in Harmony (harmony.py)."""
    return _read_config(model_path).model_type == "gpt_oss"


def _read_config(model_path: Path) -> _Config:
    try:
        return msgspec.json.decode((model_path / "config.json").read_bytes(), type=_Config)
    except (OSError, ValueError, RecursionError):
        return _Config()  # a directory of tokenizer files may have any config, or none
