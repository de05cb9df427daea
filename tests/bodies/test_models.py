"""The JSON of /v1/models."""

from __future__ import annotations

import msgspec

from kvrouter.bodies.models import ModelEntry, ModelList


def test_models() -> None:
    """Base models and adapters are listed as vLLM lists them."""
    models = [
        ModelEntry(id="base", created_s=1, root="base", max_model_len=4096),
        ModelEntry(id="lora", created_s=2, root="/loras/a", parent="base"),
    ]

    listed = msgspec.to_builtins(ModelList(data=models))

    common = {"object": "model", "owned_by": "kvrouter"}
    assert "list" == listed["object"]
    assert [
        {"id": "base", "created": 1, "root": "base", "parent": None, "max_model_len": 4096, **common},
        {"id": "lora", "created": 2, "root": "/loras/a", "parent": "base", "max_model_len": None, **common},
    ] == listed["data"]
