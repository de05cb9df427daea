"""`scripts/test-vllm`: kvrouter's predictions against the reports of real vLLM engines."""
