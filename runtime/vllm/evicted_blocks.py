"""Blocks of a request that an evicting layer frees: known from lengths alone, so that the scheduler need not ask the
device.

What stays of a prompt is moved, in its order, to the first blocks of the request, and behind them to the rows of the
prompt in the block that its end shares with the answer; the blocks between are freed. Positions keep their place in the
block table, and new tokens are appended as usual. Only whole blocks are freed, so that what is left has no holes: a
layer caches up to a block less one more tokens than its rule says, by score.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from sparsekv.plans.patterns import Budget
from sparsekv.plans.phases import Retention


@dataclass(frozen=True, slots=True)
class EvictedBlocks:
    """Holds what an evicting layer frees, as far as lengths depend on it: layers of which these are equal share their
    blocks.

    Args:
        fixed: tokens of a prompt that stay whatever its length.
        share: of all tokens of a prompt, that stay besides.
        generated: the newest tokens of an answer that stay.
        block: tokens of a block.
    """

    fixed: int
    share: Budget | None
    generated: int
    block: int

    @classmethod
    def of(cls, rule: Retention, block: int) -> EvictedBlocks:
        """Those of a rule that evicts tokens."""
        assert isinstance(rule.keep, Budget)
        assert rule.generated is not None
        fixed = _unscored(rule) + (rule.keep.tokens or 0)
        return cls(fixed, rule.keep if rule.keep.tokens is None else None, rule.generated, block)

    @lru_cache(maxsize=4096)  # noqa: B019 - of a few, which live as long as the engine
    def evicted(self, prompt: int) -> int:
        """Returns how many blocks of a complete prompt are freed."""
        share = self.share.resolve(prompt) if self.share else 0
        return max(0, prompt - self.fixed - share) // self.block

    def cached(self, prompt: int) -> int:
        """Returns how many tokens of a complete prompt stay cached."""
        return prompt - self.evicted(prompt) * self.block

    def freed(self, prompt: int, computed: int) -> tuple[range, range]:
        """The blocks that no step reads once so many tokens are computed, the prompt among them: of the prompt, and of
        the answer."""
        whole, first = prompt // self.block, -(-prompt // self.block)
        newest = max(first, (computed + 1 - self.generated) // self.block)
        return range(whole - self.evicted(prompt), whole), range(first, newest)

    def rule(self, given: Retention, prompt: int) -> Retention:
        """A layer's rule with as many chosen tokens as the blocks of this prompt have room for."""
        return given.model_copy(update={"keep": Budget(tokens=max(0, self.cached(prompt) - _unscored(given)))})


def _unscored(rule: Retention) -> int:
    """First and last tokens of a prompt, which stay whatever their score."""
    return (rule.sink or 0) + (rule.recent or 0)
