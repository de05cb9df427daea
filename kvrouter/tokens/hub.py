"""The model directory for a `--model-path`: a local directory, or a repository of a model hub."""

from __future__ import annotations

import os
import re
from pathlib import Path

from kvrouter.errors import ConfigError

_REPOSITORY = re.compile(r"[\w.-]+/[\w.-]+")
# The files that tokenizing needs. The weights, by far the largest files, are not downloaded.
_FILES = [
    "config.json",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "additional_chat_templates/*.jinja",
]


def cached_directory(name: str, cache_directory: Path | None = None) -> Path | None:
    """The directory of a repository that was downloaded before; None without one. Uses no network."""
    if not _REPOSITORY.fullmatch(name):
        return None
    try:
        import huggingface_hub

        found = huggingface_hub.snapshot_download(
            name, allow_patterns=_FILES, cache_dir=cache_directory, local_files_only=True
        )
    except Exception:  # ImportError, the library's own errors, and OSError: it is not there
        return None
    return Path(found)


def model_directory(model_path: str, cache_directory: Path | None = None, token: str | None = None) -> Path:
    """The directory; a repository (`org/name`) is downloaded first.

    $HF_ENDPOINT selects the hub, as for the engines. Raises ConfigError.
    """
    directory = Path(model_path)
    if directory.is_dir() or not _REPOSITORY.fullmatch(model_path):
        return directory
    try:
        import huggingface_hub
    except ImportError as error:
        raise ConfigError(
            f"--model-path {model_path} is not a directory; to download it from a model hub, install"
            " huggingface_hub: pip install huggingface_hub"
        ) from error
    try:
        found = huggingface_hub.snapshot_download(
            model_path,
            allow_patterns=_FILES,
            cache_dir=cache_directory,
            endpoint=os.environ.get("HF_ENDPOINT"),
            token=token,
        )
    except Exception as error:  # the library's own errors, httpx's, and OSError
        reason = str(error).strip().partition("\n")[0]
        raise ConfigError(
            f"--model-path {model_path} is not a directory, and downloading it failed: {reason}"
        ) from error
    return Path(found)
