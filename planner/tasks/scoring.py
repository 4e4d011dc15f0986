"""Exact match of generated text."""


def matches(generated: str, answer: str) -> bool:
    """Whether the generated text begins with the answer and does not go on with more digits of its number."""
    text, expected = generated.strip(), answer.strip()
    rest = text[len(expected) :]
    return text.startswith(expected) and not (expected[-1:].isdigit() and rest[:1].isdigit())
