"""The JSON of /v1/models."""

from __future__ import annotations

import json

from kvrouter.frontend.bodies.models import ModelEntry, models_body


def test_models() -> None:
    """Base models and adapters are listed as vLLM lists them."""
    models = [
        ModelEntry("base", created_s=1, max_model_len=4096),
        ModelEntry("lora", created_s=2, root="/loras/a", parent="base"),
    ]

    listed = json.loads(models_body(models))

    common = {"object": "model", "owned_by": "kvrouter"}
    assert "list" == listed["object"]
    assert [
        {"id": "base", "created": 1, "root": "base", "parent": None, "max_model_len": 4096, **common},
        {"id": "lora", "created": 2, "root": "/loras/a", "parent": "base", "max_model_len": None, **common},
    ] == listed["data"]
