"""Prompts as the engine sees them: chat template, tokenizer, prefix-token cache."""
