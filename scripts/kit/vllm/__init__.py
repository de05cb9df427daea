"""`scripts/test-vllm`: what kvrouter predicts, against what real vLLM engines report."""
