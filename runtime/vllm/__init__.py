"""The vLLM host: a plan as an attention backend of vLLM's engine."""
