"""A simulated engine: vLLM's HTTP surface and KV-event wire over a pure model. No GPU needed."""
