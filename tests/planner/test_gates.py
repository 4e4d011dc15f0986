"""What samples show of each gate: met, missed, undecided; and how often a plan is called verified by mistake."""

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from sparsekv.planner.evaluation.results import LongText, Outcome
from sparsekv.planner.gates import (
    Measured,
    PromptScores,
    Wanted,
    answering_tasks,
    claims_of,
    fewest_prompts,
    level_of,
    lost_tasks,
)
from sparsekv.planner.options import Gate
from sparsekv.plans.show import CLAIM_CAPTION, figure_of

GATE = Gate()
ATTEMPTS = 6
DENSE = Outcome(True, 1.0, 0.0, 100, 100, True)
TEXT = PromptScores(*(Outcome(None, 1.0, 0.0, 100, 100, True),) * 3)


def prompt(kl: float = 0.0, agreed: float = 1.0, exact: bool = True, right: bool = True, floor: Outcome = DENSE,
           before: bool = True, flipped: bool = False) -> PromptScores:  # fmt: skip
    """A prompt of a hundred positions."""
    dense = Outcome(before, 1.0, 0.0, 100, 100, True)
    return PromptScores(dense, floor, Outcome(right, 1.0, kl, round(100 * agreed), 100, exact, flipped))


def found(prompts: list[PromptScores], gate: Gate = GATE, phase: str = "prefill", length: int = 4096, attempt: int = 1):
    return claims_of({phase: [Measured(length, {"t": tuple(prompts)})]}, gate, attempt)[phase]


def outcomes(claims) -> dict[str, str]:
    return {name: claim.outcome for name, claim in claims.named}


def test_a_plan_that_equals_dense_on_many_prompts_meets_every_gate() -> None:
    assert set(outcomes(found([prompt()] * 200)).values()) == {"met"}


def test_the_caption_of_their_table_names_every_figure() -> None:
    one = replace(DENSE, text=LongText(0.0, 128, 128))
    names = {name.split()[0] for name in outcomes(found([PromptScores(one, one, one)] * 3))}
    assert "text_divergence" in names
    told = {figure_of(name).removesuffix(" in text") for name in names}
    assert [figure for figure in told if figure not in CLAIM_CAPTION] == []


@pytest.mark.parametrize("most", [0.02, 0.05, 0.2, 1.0])
def test_with_fewer_prompts_than_it_takes_nothing_is_verified(most: float) -> None:
    gate = GATE.model_copy(update={"max_failed": most})
    fewest = fewest_prompts(gate)
    assert outcomes(found([prompt()] * fewest, gate))["failed"] == "met"
    assert all(outcomes(found([prompt()] * n, gate))["failed"] != "met" for n in (fewest // 2, fewest - 2) if n > 0)


def test_a_few_prompts_decide_nothing() -> None:
    assert set(outcomes(found([prompt()] * 3)).values()) == {"undecided"}
    assert found([prompt()] * 3).wanted == {4096: Wanted()}


@pytest.mark.parametrize(
    ("changes", "figure"),
    [
        ({"kl": 0.2}, "divergence"),
        ({"agreed": 0.8}, "agreement at 4k"),
        ({"exact": False}, "exact at 4k"),
        ({"flipped": True}, "failed"),
        ({"right": False}, "accuracy"),
    ],
)
def test_each_figure_is_missed_by_itself(changes, figure) -> None:
    missed = [name for name, _ in found([prompt(**changes)] * 60).having("missed")]
    assert figure in missed
    assert {name.split()[0] for name in missed} == {figure.split()[0]}


@pytest.mark.parametrize(
    ("text", "figure"), [(LongText(0.2, 128, 128), "text_divergence"), (LongText(0.0, 100, 128), "text_agreement")]
)
def test_a_long_text_is_held_against_the_gates_by_itself(text: LongText, figure: str) -> None:
    dense, clean = (PromptScores(one, one, one) for one in (replace(DENSE, text=LongText(0.0, 128, 128)), DENSE))
    moved = PromptScores(dense.dense, dense.dense, replace(DENSE, text=text))
    assert [name for name, _ in found([moved] * 60).having("missed")] == [f"{figure} at 4k"]
    assert {*outcomes(found([dense] * 200)).values()} == {"met"}
    assert not any(name.startswith("text") for name in outcomes(found([clean] * 200)))


def test_a_task_that_lost_more_than_all_may_is_named_though_all_together_lost_little() -> None:
    kept = {name: (prompt(),) * 100 for name in "abcd"}
    lost = tuple(prompt(right=number >= 8) for number in range(100))
    unsolved = (prompt(before=False, right=False),) * 100
    halves = [Measured(4096, kept | {"e": lost, "f": unsolved}), Measured(8192, kept)]
    (line,) = lost_tasks("decode", halves, GATE)
    assert line.startswith("decode: ")
    assert line.endswith(": e 8% on 100 prompts")
    assert list(lost_tasks("decode", [Measured(4096, kept | {"e": lost[7:]})], GATE)) == []


def test_what_rounding_alone_does_is_not_held_against_a_plan() -> None:
    floor = Outcome(False, 1.0, 0.2, 80, 100, False, True)
    rounded = prompt(kl=0.2, agreed=0.8, exact=False, flipped=True, floor=floor)
    assert set(outcomes(found([rounded] * 200)).values()) == {"met"}


def test_a_sample_of_fifty_is_no_finding() -> None:
    one_lost = [prompt(right=number != 7) for number in range(50)]
    assert outcomes(found(one_lost))["accuracy"] == "undecided"


def test_accuracy_is_that_of_tasks_that_dense_or_the_plan_solves() -> None:
    hard, solved = [prompt(before=False, right=False)] * 60, [prompt(right=False)] * 60
    assert "accuracy" not in outcomes(found(hard))
    both = claims_of({"prefill": [Measured(4096, {"hard": tuple(hard), "solved": tuple(solved)})]}, GATE)["prefill"]
    assert both.overall["accuracy"].prompts == 59  # the first round tells which are solved
    assert both.overall["accuracy"].outcome == "missed"


DIVERGENCES = {4096: 0.0, 8192: 0.0, 16384: 0.2}


def test_a_length_at_which_a_plan_breaks_is_named_whatever_the_others_do() -> None:
    lengths = [Measured(length, {"t": (prompt(kl=kl),) * 60}) for length, kl in DIVERGENCES.items()]
    claims = claims_of({"prefill": lengths}, GATE)["prefill"]
    assert claims.missed_lengths == (16384,)
    assert outcomes(claims)["divergence at 4k"] == "met"


def test_samples_are_wanted_where_something_is_undecided() -> None:
    lengths = [Measured(4096, {"t": (prompt(),) * 200}), Measured(8192, {"t": (prompt(),) * 3})]
    claims = claims_of({"prefill": lengths}, Gate(max_failed=1.0, max_accuracy_drop=100.0, max_kl=9.0))["prefill"]
    assert claims.wanted == {  # divergence over all lengths
        4096: Wanted(answers=False, texts=False),
        8192: Wanted(answers=False),
    }
    assert found([prompt()] * 3, Gate(max_kl=0.0)).missed_lengths == (4096,)


def test_samples_of_answers_alone_decide_accuracy_and_leave_every_other_figure_as_it_was() -> None:
    first = [prompt(kl=0.01, agreed=0.99)] * 90
    before = found(first)
    assert before.wanted == {4096: Wanted(floor=False, texts=False)}
    after = found([*first, *[replace(prompt(kl=9.0), floor=None)] * 60])
    assert after.wanted == {}
    assert {name: claim for name, claim in after.named if name != "accuracy"} == {
        name: claim for name, claim in before.named if name != "accuracy"
    }


@pytest.mark.parametrize("lost", [0, 1, 2])
def test_the_bound_of_a_figure_that_met_its_gate_is_within_it(lost: int) -> None:
    """Also where the gate is only just shown: within 20 prompts of the first that it takes."""
    prompts = [prompt(right=False)] * lost + [prompt()] * 400
    decided = range(120, len(prompts), 20)
    claims = [found(prompts[:count]).overall["accuracy"] for count in decided]
    met = [claim for claim in claims if claim.outcome == "met"]
    assert met
    assert all(claim.mean <= claim.bound <= claim.gate for claim in met)
    assert all(claim.bound >= claim.gate for claim in claims if claim.outcome != "met")


@pytest.mark.parametrize("seed", range(3))
def test_the_bound_of_a_figure_that_is_undecided_is_no_less_than_its_gate(seed: int) -> None:
    rng = np.random.default_rng(seed)
    prompts = [prompt(right=lost >= 0.02, before=lost >= 0.005) for lost in rng.random(1500)]
    claims = [found(prompts[:count]).overall["accuracy"] for count in range(300, 1501, 200)]
    undecided = [claim for claim in claims if claim.outcome != "met"]
    assert all(claim.bound >= claim.gate for claim in undecided)
    assert undecided


def test_a_task_that_is_not_solved_leaves_and_the_others_go_on() -> None:
    wrong = prompt(before=False, right=False)
    one = Measured(
        4096, {"solved": (prompt(),) * 20, "hard": (wrong,) * 20, "rare": (wrong,) * 7, "text": (TEXT,) * 20}
    )
    assert tuple(answering_tasks(one, 0.5)) == ("solved", "rare")
    longer = Measured(4096, {"solved": (prompt(),) * 200, "hard": (wrong,) * 20})
    claims = claims_of({"prefill": [longer]}, GATE)["prefill"]
    assert claims.overall["accuracy"].prompts == 199
    assert claims.overall["accuracy"].outcome == "met"


def test_later_attempts_need_more_proof_and_all_together_spend_the_budget() -> None:
    assert sum(level_of(attempt) for attempt in range(1, 40)) == pytest.approx(0.05)
    prompts = [prompt()] * 140
    assert outcomes(found(prompts))["failed"] == "met"
    assert outcomes(found(prompts, attempt=6))["failed"] == "undecided"


def test_a_gate_that_allows_everything_is_met_and_one_of_nothing_is_never() -> None:
    assert outcomes(found([prompt(exact=False)], Gate(min_exact=0.0)))["exact at 4k"] == "met"
    none = outcomes(found([prompt()] * 300, Gate(max_kl=0.0, max_accuracy_drop=0.0, min_agreement=1.0, min_exact=1.0)))
    assert {none[name] for name in ("divergence", "accuracy", "agreement at 4k", "exact at 4k")} == {"undecided"}


def test_gates_are_strict_when_none_is_looser_than_its_default() -> None:
    assert GATE.is_strict
    assert Gate(max_kl=0.004, min_agreement=0.99).is_strict
    for looser in ({"max_kl": 0.05}, {"min_exact": 0.5}, {"max_failed": 0.06}, {"max_accuracy_drop": 3.1}):
        assert not Gate(**looser).is_strict


# --- how often plans are called verified, or missed, by mistake -------------------------------------------------------

Drawn = Callable[[np.random.Generator], PromptScores]


def _excess(times: float, shape: float) -> Drawn:
    """Log-normal divergence of a mean of so many gates."""
    return lambda rng: prompt(kl=times * 0.05 * float(np.exp(shape * rng.standard_normal() - shape**2 / 2.0)))


def _broken(share: float) -> Drawn:
    return lambda rng: prompt(kl=6.0 if rng.random() < share else 0.01)


def _dropping(points: float) -> Drawn:
    """Of a task that dense solves nine times of ten, and plans beside it now and then."""

    def draw(rng: np.random.Generator) -> PromptScores:
        before = rng.random() < 0.9
        right = before if rng.random() > 0.02 else not before
        return prompt(before=before, right=right and rng.random() >= points / 90.0 * 100.0 / 98.0)

    return draw


def _half_of_every_gate(rng: np.random.Generator) -> PromptScores:
    kl = 1.0 if rng.random() < 0.01 else 0.015 * float(np.exp(rng.standard_normal() - 0.5))
    before = rng.random() < 0.9
    right = before if rng.random() > 0.01 else not before
    return prompt(kl=kl, agreed=rng.normal(0.975, 0.02), exact=rng.random() < 0.8, before=before, right=right)


def _plan(draw: Drawn, rng: np.random.Generator, prompts: int, attempt: int = 1) -> set[str]:
    """What a plan comes out as; looked at after every round, since what was shown stays shown."""
    tasks = {name: tuple(draw(rng) for _ in range(prompts // 5)) for name in "abcde"}
    claims = claims_of({"prefill": [Measured(4096, tasks)]}, GATE, attempt, bounded=False)
    return set(outcomes(claims["prefill"]).values())


def _verified(draw: Drawn, runs: int, prompts: int = 400) -> float:
    """How often one of six attempts is verified, each looked at again and again."""
    rng = np.random.default_rng(0)
    tried = ((_plan(draw, rng, prompts, attempt) == {"met"} for attempt in range(1, ATTEMPTS + 1)) for _ in range(runs))
    return sum(map(any, tried)) / runs


MISTAKES = {
    "1.2 gates": _excess(1.2, 1.0),
    "1.2 gates, skewed": _excess(1.2, 1.5),
    "8% broken": _broken(0.08),
    "3.6 points": _dropping(3.6),
}


@pytest.mark.parametrize("case", MISTAKES)
def test_a_bad_plan_is_rarely_verified(case) -> None:
    assert _verified(MISTAKES[case], runs=6, prompts=300) <= 0.2


@pytest.mark.slow
@pytest.mark.timeout(3000)
@pytest.mark.parametrize("case", MISTAKES)
def test_a_bad_plan_is_verified_once_in_twenty_at_most(case) -> None:
    assert _verified(MISTAKES[case], runs=100) <= 0.05


def test_a_plan_at_half_of_every_gate_is_rarely_missed_and_dense_never() -> None:
    rng = np.random.default_rng(0)
    assert not any("missed" in _plan(lambda _: prompt(), rng, 200) for _ in range(3))
    assert sum("missed" in _plan(_half_of_every_gate, rng, 300) for _ in range(40)) <= 2
