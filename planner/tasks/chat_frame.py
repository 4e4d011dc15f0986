"""The frame that a chat template puts around a user's message, as tokens, so that prompts come out exact in length."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

from sparsekv.planner.tasks.text import PieceEncoder
from sparsekv.plans.errors import PlanWarning

_MESSAGE = "the-message-itself"
# Templates that know these otherwise write today's date, or leave room to think before the answer.
_SETTINGS: dict[str, Any] = {"date_string": "26 Jul 2024", "enable_thinking": False}


@dataclass(frozen=True, slots=True)
class ChatFrame:
    """Token ids before a user's message, with the begin token where there is one, and between it and the answer."""

    before_ids: tuple[int, ...]
    after_ids: tuple[int, ...]

    @classmethod
    def of(cls, tokenizer: Any, encoder: PieceEncoder) -> ChatFrame | None:
        """That of a tokenizer's chat template; None where it has none.

        A template that fails on a single message, or does not repeat it as it is, warns with a `PlanWarning` and
        counts as none.
        """
        if getattr(tokenizer, "chat_template", None) is None:
            return None
        messages = [{"role": "user", "content": _MESSAGE}]
        try:
            rendered = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=True, **_SETTINGS)
        except Exception as error:  # a template is a program: it raises what it likes
            _warn(f"one that fails ({error!s:.200})")
            return None
        parts = rendered.split(_MESSAGE)
        if len(parts) != 2:
            _warn(f"one that repeats it {len(parts) - 1} times")
            return None
        before_ids, after_ids = encoder.encode_lines(parts)
        return cls(tuple(before_ids), tuple(after_ids))


def _warn(found: str) -> None:
    warnings.warn(
        f"expected a chat template that repeats a user's message once, found {found}; prompts of tasks go without it",
        PlanWarning,
        stacklevel=4,
    )
