"""The rows of a cache under any mix of padded turns, decode steps and picked rows are those of transformers' own."""

import copy

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule, run_state_machine_as_test
from tiny_models import random_tokens, tiny_model
from tiny_plans import EVERYTHING, decode_plan, plan_for, segment
from transformers import DynamicCache

from sparsekv.plans.errors import ShapeError, UnsupportedError, UsageError
from sparsekv.runtime.hf.apply import apply

MOST_ROWS = 5
SIDES = st.sampled_from(["left", "right", "both"])
PLANS = {
    "dense": None,
    "last": decode_plan(segment(0, (1, 2), EVERYTHING)),
    "uniform": decode_plan(segment(0, (1, 2), EVERYTHING, selector="uniform", window=3)),
}


class Rows(RuleBasedStateMachine):
    """One conversation over two caches: ours, and transformers' with the positions of each row."""

    decode = None
    model, theirs = tiny_model(), tiny_model()

    def __init__(self):
        super().__init__()
        self.handle = apply(self.model, plan_for(self.model, None, self.decode))
        self.drawn = 0

    def teardown(self):
        self.handle.close()

    @torch.no_grad()
    def run_both(self, new, given=True):
        """Runs random tokens where the mask `new` says so; `given` is whether ours is given the mask."""
        self.drawn += 1
        ids = random_tokens(*new.shape, self.drawn) * new
        self.mask = torch.cat((self.mask, new), 1)
        positions = (self.mask.cumsum(1) - 1).clamp(min=0)[:, -new.shape[1] :]
        expected = self.theirs(ids, attention_mask=self.mask, position_ids=positions, past_key_values=self.plain)
        found = self.model(ids, attention_mask=self.mask if given else None, past_key_values=self.cache)
        torch.testing.assert_close(found.logits[new == 1], expected.logits[new == 1], rtol=1e-4, atol=1e-4)
        self.check_rows()

    def check(self):
        for ours, theirs in zip(self.cache.layers, self.plain.layers, strict=True):
            assert ours.get_seq_length() == theirs.get_seq_length() == self.mask.shape[1]

    def check_rows(self):
        self.check()
        assert {layer.store.lengths for layer in self.cache.layers} == {tuple(self.mask.sum(1).tolist())}

    def pick(self, rows):
        self.mask = self.mask[rows]
        self.check_rows()

    def padded(self, side, lengths, spare):
        columns = max(lengths) + spare
        first = {"left": columns, "right": 0, "both": columns // 2}[side]
        new = torch.zeros(len(self.mask), columns, dtype=torch.long)
        for row, length in zip(new, lengths, strict=False):
            begin = min(first, columns - length)
            row[begin : begin + length] = 1
        return new

    @initialize(batch=st.integers(1, 3), side=SIDES, lengths=st.lists(st.integers(1, 9), min_size=3, max_size=3))
    def begins(self, batch, side, lengths):
        self.cache, self.plain, self.mask = DynamicCache(), DynamicCache(), torch.zeros(batch, 0, dtype=torch.long)
        self.run_both(self.padded(side, lengths[:batch], 0))

    @rule(
        side=SIDES, lengths=st.lists(st.integers(1, 6), min_size=MOST_ROWS, max_size=MOST_ROWS), spare=st.integers(0, 2)
    )
    def turns(self, side, lengths, spare):
        new = self.padded(side, lengths[: len(self.mask)], spare)
        if new.shape[1] > 1:
            self.run_both(new)

    @rule(tokens=st.integers(1, 4), given=st.booleans())
    def goes_on(self, tokens, given):
        self.run_both(torch.ones(len(self.mask), tokens, dtype=torch.long), given)

    @rule(rows=st.lists(st.integers(-MOST_ROWS, MOST_ROWS - 1), min_size=1, max_size=MOST_ROWS))
    def selects(self, rows):
        rows = torch.tensor([row % len(self.mask) - (row < 0) * len(self.mask) for row in rows])
        self.cache.batch_select_indices(rows)
        self.plain.batch_select_indices(rows)
        self.pick(rows)

    @rule(left=st.lists(st.booleans(), min_size=MOST_ROWS, max_size=MOST_ROWS))
    def selects_by_mask(self, left):
        left = torch.tensor(left[: len(self.mask)])
        if not left.any():
            with pytest.raises(UsageError, match="none selected"):
                self.cache.batch_select_indices(left)
            return self.check()
        self.cache.batch_select_indices(left)
        self.plain.batch_select_indices(left)
        return self.pick(left)

    @precondition(lambda self: 2 * len(self.mask) <= MOST_ROWS)
    @rule()
    def repeats(self):
        self.cache.batch_repeat_interleave(2)
        self.plain.batch_repeat_interleave(2)
        self.pick(torch.arange(len(self.mask)).repeat_interleave(2))

    @rule(rows=st.lists(st.integers(0, MOST_ROWS - 1), min_size=MOST_ROWS, max_size=MOST_ROWS))
    def reorders(self, rows):
        rows = torch.tensor(rows[: len(self.mask)]) % len(self.mask)
        self.cache.reorder_cache(rows)
        self.plain.reorder_cache(rows)
        self.pick(rows)

    @rule()
    def goes_on_from_a_copy(self):
        self.cache = copy.deepcopy(self.cache)

    @rule(tokens=st.integers(1, 3))
    def is_not_cropped(self, tokens):
        with pytest.raises(UnsupportedError, match="cropping"):
            self.cache.crop(-tokens)
        self.check()

    @rule(layer=st.integers(0, 2), tokens=st.integers(1, 3))
    def fails(self, layer, tokens):
        """A pass that does not get through its layers leaves nothing, whatever comes next."""

        def broken(*args):
            raise ZeroDivisionError

        ids = random_tokens(len(self.mask), tokens, self.drawn)
        hook = self.model.model.layers[layer].mlp.register_forward_pre_hook(broken)
        with torch.no_grad(), hook, pytest.raises(ZeroDivisionError):
            self.model(ids, past_key_values=self.cache)
        self.check()

    @rule(more=st.integers(1, 2), tokens=st.integers(1, 3), given=st.booleans())
    def refuses_tokens_of_other_rows(self, more, tokens, given):
        rows, columns = self.mask.shape
        mask = torch.ones(rows + more, columns + tokens, dtype=torch.long) if given else None
        with torch.no_grad(), pytest.raises(ShapeError, match="new cache"):
            self.model(random_tokens(rows + more, tokens), attention_mask=mask, past_key_values=self.cache)
        self.check()

    @rule(more=st.sampled_from([(0, 1), (0, -1), (1, 0)]), tokens=st.integers(1, 3))
    def refuses_masks_of_another_shape(self, more, tokens):
        rows, columns = self.mask.shape
        mask = torch.ones(rows + more[0], columns + tokens + more[1], dtype=torch.long)
        with torch.no_grad(), pytest.raises(UnsupportedError, match="attention_mask of shape"):
            self.model(random_tokens(rows, tokens), attention_mask=mask, past_key_values=self.cache)
        self.check()


@pytest.mark.parametrize("plan", PLANS)
def test_rows_of_any_mix_of_turns_and_picks_are_those_of_transformers(plan):
    machine = type(f"Rows_{plan}", (Rows,), {"decode": PLANS[plan]})
    run_state_machine_as_test(
        machine, settings=settings(max_examples=30, stateful_step_count=12, deadline=None, report_multiple_bugs=False)
    )
