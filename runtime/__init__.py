"""A plan put to work on an unmodified Hugging Face model."""
