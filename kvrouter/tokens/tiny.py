"""The demo's model directory, built on this machine in a second, without a download.

It has a byte-level BPE tokenizer of 2,000 tokens trained on Python's documentation, a ChatML template, and
the config of a two-layer Qwen2, so that a real engine can serve it as well (vLLM: `--load-format dummy`).

    python -m kvrouter.tokens.tiny DIR             # --images: a Qwen2-VL, which reads images
"""

from __future__ import annotations

import argparse
import json
import os
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, trainers

VOCABULARY_SIZE = 2_000
MAX_MODEL_TOKENS = 32_768

# Files of the standard library: mostly English, some code, and equal on all machines with the same Python.
_CORPUS = ("pydoc_data/topics.py", "argparse.py", "typing.py", "asyncio/base_events.py")

# Qwen2's pattern. transformers 5 applies it to every model of type qwen2 and ignores tokenizer.json.
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)

_SPECIAL_TOKENS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")

# Their ids follow those of the vocabulary.
_IMAGE_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")

_IMAGE_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' }}
{%- if message.content is string %}{{ message.content }}
{%- else %}{% for part in message.content %}
{%- if part.type == 'image' %}{{ '<|vision_start|><|image_pad|><|vision_end|>' }}
{%- else %}{{ part.text }}{% endif %}
{%- endfor %}{% endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""

_CHAT_TEMPLATE = """\
{%- if tools %}
{{- '<|im_start|>system\\nTools:\\n' }}
{%- for tool in tools %}{{ tool | tojson + '\\n' }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
{{- '<|im_start|>' + message.role + '\\n' + message.content }}
{%- for call in message.tool_calls or [] %}{{ '\\n' + call.function | tojson }}{% endfor %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}
"""


def build_tiny_model(path: Path, *, images: bool = False) -> None:
    """Fill `path` with a model directory, unless it is complete already. `images`: of a Qwen2-VL.

    Files are moved into place when complete, so several processes can build one directory concurrently.
    """
    files = _IMAGE_FILES if images else _FILES
    if all((path / name).is_file() for name in files):
        return
    path.mkdir(parents=True, exist_ok=True)
    tokenizer = _trained_tokenizer()
    if images:
        tokenizer.add_special_tokens(list(_IMAGE_TOKENS))
    for name, content in files.items():
        _write_whole(path / name, tokenizer.to_str() if content is None else content)


def main(arguments: Sequence[str] | None = None) -> None:
    """Build the model in the directory given on the command line."""
    parser = argparse.ArgumentParser(prog="python -m kvrouter.tokens.tiny", description=__doc__)
    parser.add_argument("directory", type=Path, help="where to build it")
    parser.add_argument("--images", action="store_true", help="a Qwen2-VL, whose chats may have images")
    given = parser.parse_args(arguments)
    build_tiny_model(given.directory, images=given.images)


def _trained_tokenizer() -> tokenizers.Tokenizer:
    words = pre_tokenizers.Split(tokenizers.Regex(_WORDS), "isolated")
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY_SIZE,
        special_tokens=list(_SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    library = Path(sysconfig.get_path("stdlib"))
    tokenizer.train_from_iterator(((library / name).read_text("utf-8") for name in _CORPUS), trainer)
    return tokenizer


def _write_whole(file: Path, text: str) -> None:
    unfinished = file.with_name(f".{file.name}.{os.getpid()}")
    unfinished.write_text(text, "utf-8")
    unfinished.replace(file)


def _config() -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "model_type": "qwen2",
        "vocab_size": VOCABULARY_SIZE,
        "max_position_embeddings": MAX_MODEL_TOKENS,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-6,
        "rope_theta": 10_000.0,
        "tie_word_embeddings": False,
        "torch_dtype": "float32",
        **_ENDS,
    }


def _image_config() -> dict[str, Any]:
    start, end, image, video = range(VOCABULARY_SIZE, VOCABULARY_SIZE + len(_IMAGE_TOKENS))
    vision = {
        "model_type": "qwen2_vl",
        "depth": 1,
        "embed_dim": 64,
        "hidden_size": 64,
        "mlp_ratio": 2,
        "num_heads": 2,
        "in_chans": 3,
        **_PATCHES,
        "spatial_merge_size": _PROCESSOR["merge_size"],
    }
    return _config() | {
        "architectures": ["Qwen2VLForConditionalGeneration"],
        "model_type": "qwen2_vl",
        "vocab_size": VOCABULARY_SIZE + len(_IMAGE_TOKENS),
        "num_key_value_heads": 2,
        "rope_scaling": {"type": "mrope", "mrope_section": [4, 6, 6]},
        "vision_config": vision,
        "vision_start_token_id": start,
        "vision_end_token_id": end,
        "image_token_id": image,
        "video_token_id": video,
    }


def _tokenizer_config() -> dict[str, Any]:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": MAX_MODEL_TOKENS,
        "clean_up_tokenization_spaces": False,
        "bos_token": None,
        "eos_token": "<|im_end|>",
        "pad_token": "<|endoftext|>",
    }


# Ids of special tokens: the trainer puts these first in the vocabulary, in the order of _SPECIAL_TOKENS.
_ENDS = {"bos_token_id": None, "eos_token_id": 2, "pad_token_id": 0}

_PATCHES = {"patch_size": 14, "temporal_patch_size": 2}
_PROCESSOR = {
    "processor_class": "Qwen2VLProcessor",
    "image_processor_type": "Qwen2VLImageProcessor",
    "min_pixels": 56 * 56,
    "max_pixels": 448 * 448,
    "merge_size": 2,
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
    **_PATCHES,
}

_FILES: dict[str, str | None] = {
    "tokenizer.json": None,  # trained
    "tokenizer_config.json": json.dumps(_tokenizer_config(), indent=2),
    "chat_template.jinja": _CHAT_TEMPLATE,
    "config.json": json.dumps(_config(), indent=2),
    "generation_config.json": json.dumps(_ENDS, indent=2),
}

_IMAGE_FILES = _FILES | {
    "chat_template.jinja": _IMAGE_TEMPLATE,
    "config.json": json.dumps(_image_config(), indent=2),
    "preprocessor_config.json": json.dumps(_PROCESSOR, indent=2),
}

if __name__ == "__main__":
    main()
