"""A model directory from what `--model-path` names: a directory, or a repository of a model hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvrouter.errors import ConfigError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# What tokenizing needs; the weights stay where they are.
_FILES = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]


def model_directory(model_path: str, cache_directory: Path | None = None) -> Path:
    """The directory, after a download where a hub's repository is named (`org/name`).

    $HF_ENDPOINT and $HF_TOKEN say which hub and who asks, as for the engines. Raises ConfigError.
    """
    directory = Path(model_path)
    if directory.is_dir() or not _REPOSITORY.fullmatch(model_path):
        return directory
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"--model-path {model_path} is no directory, and to fetch it from a model hub huggingface_hub"
            " must be installed: pip install huggingface_hub"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(
            model_path,
            allow_patterns=_FILES,
            cache_dir=cache_directory,
            endpoint=os.environ.get("HF_ENDPOINT"),
            token=os.environ.get("HF_TOKEN"),
        )
    except Exception as error:  # its own, httpx's, and OSError: whatever stops a download
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--model-path {model_path} is no directory here, and fetching it failed: {reason}"
        ) from error
    return Path(found)
