"""The vLLM host: a plan's sparse prefill as an attention backend of vLLM's engine."""
