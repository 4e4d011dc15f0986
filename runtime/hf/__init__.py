"""The Hugging Face transformers host: attaching, caches, long inputs, generation."""
