"""Samplers that learn in the whole space and propose within a subspace."""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.placement.shares import LED_FLOOR, PromiseShares
from shadho_celery.samplers import find_sampler
from shadho_celery.samplers.auto import AutoSampler, Decade, allows_outlook
from shadho_celery.samplers.gp import GpSampler
from shadho_celery.samplers.random import Sampler
from shadho_celery.samplers.wrapped import LEAST, MORE, Unrepeated
from shadho_celery.scheduler.proposals import make_samplers
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import Subspace, split

#: three branches with a label each, and a label that all of them share
SPACE = {
    "model": hp.choice("model", [{"kind": kind, "own": hp.uniform(f"own{kind}", -1, 1)} for kind in range(3)]),
    "rate": hp.uniform("rate", -5, 5),
}

Loss = Callable[[Params], float | None]


class Search:
    """Samplers of a study's subspaces, and a loss, which is None for a failure."""

    def __init__(self, name: str, loss: Loss, space: Any = SPACE, seed: int = 0) -> None:
        self.subspaces = split(compile_space(space))
        self.samplers: Mapping[str, Sampler] = make_samplers(find_sampler(name, 100), self.subspaces, (seed,))
        self._loss, self._number = loss, 0

    @property
    def whole(self) -> Any:
        """The sampler that all subspaces share."""
        (whole,) = {id(each.sampler): each.sampler for each in self.samplers.values()}.values()  # type: ignore[attr-defined]
        return whole

    def ask(self, subspace: Subspace, n: int = 1) -> list[Params]:
        asked = self.samplers[subspace.name].ask(n, [])
        for params in asked:
            assert subspace.contains(params)
            subspace.space.check(params)
        return asked

    def run(self, subspace: Subspace, trials: int) -> list[float | None]:
        """Run trials in a subspace, fewer if it is exhausted. Return their losses."""
        asked = [params for _ in range(trials) for params in self.ask(subspace) if self.tell(subspace, params) is None]
        return [self._loss(params) for params in asked]

    def tell(self, subspace: Subspace, params: Params) -> None:
        loss = self._loss(params)
        outcome = Outcome(state=TrialState.FAILED if loss is None else TrialState.COMPLETE, loss=loss, seconds=60.0)
        trial = Trial(number=self._number, subspace=subspace.name, params=params, state=outcome.state, outcome=outcome)
        self._number += 1
        self.samplers[subspace.name].tell([trial])


def bowl(params: Params) -> float:
    """Loss whose best rate is 3 in all branches; the last branch is the best one."""
    own = next(value for label, value in params.items() if label.startswith("own"))
    return (float(params["rate"]) - 3) ** 2 + float(own) ** 2 - 2.0 * float(params["model"])


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gp", "tpe"])
def test_what_one_subspace_has_learned_is_used_in_another_one(name: str) -> None:
    asked = []
    # A single seed depends on how the machine rounds.
    for search in [Search(name, bowl, seed=seed) for seed in range(3)]:
        first, second, _ = search.subspaces
        search.run(first, 30)
        asked += [search.ask(second)[0] for _ in range(8) if search.run(second, 1)]
    # Draws from -5 to 5 are 3 away from 3 in the median.
    assert np.median([abs(float(params["rate"]) - 3) for params in asked]) < 1.7


#: best rate of each branch
BEST: dict[str, tuple[float, ...]] = {"alike": (3.0, 3.0, 3.0), "shifted": (0.0, 1.5, 3.0), "opposed": (4.0, -4.0, 0.0)}


@pytest.mark.slow
@pytest.mark.parametrize("best", BEST.values(), ids=BEST)
def test_the_best_values_of_a_label_may_be_alike_shifted_or_opposed(best: tuple[float, ...]) -> None:
    search = Search("auto", lambda params: (float(params["rate"]) - best[int(params["model"])]) ** 2)
    losses = [[search.run(subspace, 1)[0] for subspace in search.subspaces] for _ in range(16)]
    # Of 16 draws, the best one has a loss of .05 in the median.
    assert np.min(np.array(losses, float), axis=0).max() < 1e-3


@pytest.mark.parametrize("name", ["gp", "tpe"])
def test_the_outlook_of_the_best_subspace_is_the_best(name: str) -> None:
    search = Search(name, bowl)
    # After more of them, gp has found the best loss.
    for _ in range(5):
        for subspace in search.subspaces:
            search.run(subspace, 1)
    outlook = search.whole.outlook(search.subspaces, 0)
    best = search.subspaces[-1].name
    assert outlook[best] == max(outlook.values()) == 1.0
    assert min(outlook.values()) < 0.7
    assert search.whole.outlook(search.subspaces, 0) is outlook


def test_by_the_outlook_of_tpe_the_best_of_three_subspaces_gets_more_than_half_of_the_trials() -> None:
    """By the root of the improvement alone, which is bounded, it would get less than half."""
    search = Search("tpe", bowl)
    for _ in range(10):
        for subspace in search.subspaces:
            search.run(subspace, 1)
    outlook = search.whole.outlook(search.subspaces, 0)
    assert outlook[search.subspaces[-1].name] > 0.55 * sum(outlook.values())


def test_a_worse_subspace_that_still_improves_gets_trials_once_the_best_one_has_converged() -> None:
    """Its losses may fall below the best one later, although the process does not expect it of the next trial."""

    def loss(params: Params) -> float:
        if params["model"] == 2:
            return 2.0 - 0.3 * float(params["own2"])
        return 0.2 + 0.001 * (float(params["rate"]) - 3) ** 2

    search = Search("gp", loss)
    for subspace in search.subspaces:
        search.run(subspace, 15)
    outlook = search.whole.outlook(search.subspaces, 0)
    # By the improvement of the best loss alone it is less than 1e-9.
    assert outlook[search.subspaces[-1].name] > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gp", "tpe"])
def test_a_subspace_with_worse_losses_is_searched_near_its_own_best_trials(name: str) -> None:
    """In other subspaces the loss is lower whatever their params are."""
    search = Search(name, lambda params: (float(params["own2"]) - 0.7) ** 2 if params["model"] == 2 else -1.0)
    first, _, last = search.subspaces
    search.run(first, 30)
    search.run(last, 10)
    losses = [loss for loss in search.run(last, 20) if loss is not None]
    # Draws from -1 to 1 have a loss of .5 in the median.
    assert np.median(losses) < 0.15


def test_the_first_trials_cover_the_structures_of_the_space() -> None:
    """Also if several trials run at the same time."""
    choices = {f"c{place}": hp.choice(f"c{place}", [0, hp.uniform(f"x{place}", 0, 1)]) for place in range(5)}
    search = Search("auto", lambda params: 0.0, choices)
    assert len(search.subspaces) == 32
    outlooks = [search.whole.outlook(search.subspaces, pending) for pending in range(10)]
    chosen = [max(each, key=each.__getitem__) for each in outlooks]
    for place in range(5):
        options = Counter(next(s for s in search.subspaces if s.name == name).fixed[f"c{place}"] for name in chosen)
        assert min(options[0], options[1]) >= 3


def test_in_the_first_trial_of_a_branch_its_own_labels_are_at_their_medians() -> None:
    search = Search("auto", bowl)
    first, second, _ = search.subspaces
    assert search.ask(first) == [{"model": 0, "own0": 0.0, "rate": 0.0}]
    search.tell(first, search.ask(first)[0])
    params, again = search.ask(second, 2)
    assert params["own1"] == 0.0
    assert params["rate"] != 0.0
    assert again["own1"] != 0.0


def test_the_labels_of_the_largest_branch_count_not_those_of_all() -> None:
    branches = [{f"own{place}": hp.uniform(f"own{place}", -1, 1), **_labels(place, 8)} for place in range(5)]
    search = Search("auto", lambda params: 0.0, {"model": hp.choice("model", branches)})
    for place in range(12):
        search.run(search.subspaces[place % 5], 1)
    assert not search.whole.choice.startswith("tpe")


def test_the_labels_of_one_trial_count_also_in_a_space_with_too_many_branches_to_split() -> None:
    space = hp.choice("m", [{"own": hp.uniform(f"own{place}", 0, 1), "kind": place} for place in range(100)])
    search = Search("auto", lambda params: float(params["m"]) / 100, space)
    (subspace,) = search.subspaces
    search.run(subspace, 12)
    assert search.whole.choice.startswith("gp")


def _labels(branch: int, number: int) -> dict[str, Any]:
    return {f"x{branch}_{place}": hp.uniform(f"x{branch}_{place}", -1, 1) for place in range(number)}


def test_a_space_without_branches_is_searched_as_before() -> None:
    search = Search("gp", lambda params: float(params["x"]) ** 2, {"x": hp.uniform("x", -5, 5)})
    alone = GpSampler(search.subspaces[0], (0, 0))
    for _ in range(14):
        (params,) = search.ask(search.subspaces[0])
        assert alone.ask(1, []) == [params]
        search.tell(search.subspaces[0], params)
        loss = float(params["x"]) ** 2
        alone.tell([Trial(number=0, subspace="all", params=params, state=TrialState.COMPLETE,
                          outcome=Outcome(state=TrialState.COMPLETE, loss=loss, seconds=60.0))])  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", ["tpe", "auto"])
@pytest.mark.parametrize(
    ("space", "loss"),
    [
        pytest.param(SPACE, lambda params: None if params["model"] == 1 else bowl(params), id="one branch fails"),
        pytest.param(SPACE, lambda params: None, id="all fail"),
        pytest.param(SPACE, lambda params: math.inf if params["model"] else bowl(params), id="infinite"),
        pytest.param(
            hp.choice("m", [{"only": hp.uniform("only", 0, 1)}, 1, 2, 3]),
            lambda params: float(params.get("only", 2.0)),
            id="labels of one branch",
        ),
        pytest.param(
            {"big": hp.choice("big", [*range(10_000)]), "m": hp.choice("m", [0, hp.uniform("y", 0, 1)])},
            lambda params: float(params["big"]) + float(params.get("y", 2.0)),
            id="many options",
        ),
        pytest.param(
            {"m": hp.choice("m", [hp.uniform(f"z{place}", 0, 1) for place in range(100)]), "r": hp.uniform("r", 0, 1)},
            lambda params: float(params["r"]),
            id="a hundred branches",
        ),
        pytest.param(
            hp.choice("m", [hp.uniform(f"z{place}", 0, 1) for place in range(1_050)]),
            lambda params: float(params["m"]),
            id="a choice of many branches",
        ),
    ],
)
def test_any_history_gives_valid_proposals(name: str, space: Any, loss: Loss) -> None:
    search = Search(name, loss, space)
    for place in range(24):
        search.run(search.subspaces[place % min(len(search.subspaces), 20)], 1)
    outlook = search.whole.outlook(search.subspaces, 0)
    assert set(outlook) == {subspace.name for subspace in search.subspaces}
    assert all(0.0 <= gain <= 1.0 for gain in outlook.values())
    search.ask(search.subspaces[-1], 3)


@pytest.mark.parametrize("name", ["gp", "tpe"])
@pytest.mark.parametrize("loss", [0.5, None], ids=["success", "failure"])
def test_a_label_that_only_one_trial_has_is_drawn_from_its_law(name: str, loss: float | None) -> None:
    """The only trial of its branch, which may be the only failure or the only success."""
    other = None if loss is not None else 0.5
    search = Search(name, lambda params: loss if params["model"] == 0 else other)
    first, *others = search.subspaces
    search.run(first, 1)
    for place in range(24):
        search.run(others[place % 2], 1)
    asked = search.ask(first, 6)
    assert len({float(params["own0"]) for params in asked}) == 6
    assert 0.0 <= search.whole.outlook(search.subspaces, 0)[first.name] <= 1.0


def test_several_losses_are_learned_from_all_subspaces() -> None:
    search = Search("tpe", lambda params: 0.0)
    for place in range(45):
        subspace = search.subspaces[place % 3]
        (params,) = search.ask(subspace)
        rate = float(params["rate"])
        losses = {"low": (rate - 2.0) ** 2, "high": (rate - 4.0) ** 2}
        outcome = Outcome(state=TrialState.COMPLETE, loss=losses["low"], losses=losses, seconds=60.0)
        search.samplers[subspace.name].tell(
            [Trial(number=place, subspace=subspace.name, params=params, state=outcome.state, outcome=outcome)]
        )
    asked = [params for subspace in search.subspaces for params in search.ask(subspace, 8)]
    # The front is between 2 and 4; draws from -5 to 5 are 3 away from 3 in the median.
    assert np.median([abs(float(params["rate"]) - 3.0) for params in asked]) < 1.7


@pytest.mark.slow
@pytest.mark.parametrize("name", ["gp", "tpe"])
def test_budgets_are_learned_from_all_subspaces(name: str) -> None:
    """Losses of the low budget mislead, and are not mixed with those of the high one."""
    search = Search(name, bowl)
    search.samplers = make_samplers(find_sampler(name, 100, budgets=[1.0, 3.0]), search.subspaces, (0,))
    for place in range(60):
        subspace = search.subspaces[place % 3]
        (params,) = search.ask(subspace)
        budget = 1.0 if place < 20 else 3.0
        loss = (float(params["rate"]) - (3.0 if budget == 3.0 else -3.0)) ** 2
        outcome = Outcome(state=TrialState.COMPLETE, loss=loss, seconds=60.0)
        trial = Trial(
            number=place, subspace=subspace.name, params=params, budget=budget, state=outcome.state, outcome=outcome
        )
        search.samplers[subspace.name].tell([trial])
    if name == "gp":
        search.whole.budget = 3.0
    assert search.whole.budget == 3.0
    asked = [params for subspace in search.subspaces for params in search.ask(subspace, 6)]
    assert np.median([abs(float(params["rate"]) - 3.0) for params in asked]) < 1.7


def test_pending_trials_of_other_subspaces_are_not_points_of_a_finite_one() -> None:
    space = {"m": hp.choice("m", [{"a": hp.choice("a", [0, 1])}, {"b": hp.choice("b", [0, 1])}])}
    search = Search("tpe", lambda params: 0.0, space)
    first, second = search.subspaces
    pending = [Trial(number=place, subspace=second.name, params={"m": 1, "b": place}) for place in range(2)]
    asked = search.samplers[first.name].ask(2, pending)
    assert sorted(params["a"] for params in asked) == [0, 1]


def _told_at_once(space: Any, number: int, **outcome: Any) -> AutoSampler:
    """Return a sampler of a space after so many trials with equal losses, and a proposal."""
    search = Search("auto", lambda params: 0.0, space)
    auto = search.whole
    assert isinstance(auto, AutoSampler)
    for place in range(number):
        subspace = search.subspaces[place % len(search.subspaces)]
        params = subspace.sample(np.random.default_rng(place), 1)[0]
        ended = Outcome(state=TrialState.COMPLETE, loss=0.0, **{"seconds": 60.0, **outcome})
        auto.tell([Trial(number=place, subspace=subspace.name, params=params, state=ended.state, outcome=ended)])
    search.ask(search.subspaces[0])
    return auto


def test_the_line_says_what_is_learned_from_all_subspaces_whichever_sampler_is_used() -> None:
    wide = {**SPACE, **{f"x{place}": hp.uniform(f"x{place}", 0, 1) for place in range(30)}}
    shared = "rate, x0, x1 and 28 more labels learnt from all 3 subspaces"
    assert _told_at_once(wide, 24).choice == f"tpe, {shared}: 32 hyperparameters are more than 30"
    said = _told_at_once(SPACE, 24, losses={"a": 0.0, "b": 1.0}).choice
    assert said == "tpe, rate learnt from all 3 subspaces: it learns 2 losses at once"
    said = _told_at_once(SPACE, 24, seconds=0.001).choice
    assert said.startswith("gp and tpe in turn, rate learnt from all 3 subspaces: trials take under 0.1 s")
    said = _told_at_once(SPACE, 24).choice
    assert said.startswith("gp and tpe alternating, rate learnt from all 3 subspaces: gp predicts less than 10%")


@pytest.mark.parametrize(("shared", "words"), [(3, "all 3"), (2, "several of the 3")])
def test_the_line_says_whether_all_subspaces_have_a_label(shared: int, words: str) -> None:
    x = hp.uniform("x", 0, 1)
    branches = [{"x": x} if place < shared else {"z": hp.uniform("z", 0, 1)} for place in range(3)]
    search = Search("auto", lambda params: float(params.get("x", 0.5)), {"m": hp.choice("m", branches)})
    for _ in range(6):
        for subspace in search.subspaces:
            search.run(subspace, 1)
    search.ask(search.subspaces[0])
    assert f"x learnt from {words} subspaces" in search.whole.choice


def test_a_sampler_of_a_single_subspace_does_not_compare_subspaces() -> None:
    """A user's own class may have one in each subspace, and a nested choice is in some subspaces only."""
    inner = hp.choice("inner", [{"x": hp.uniform("x", 0, 1)}, {"y": hp.uniform("y", 0, 1)}])
    first, *_ = split(compile_space({"outer": hp.choice("outer", [{"w": hp.uniform("w", 0, 1)}, {"in": inner}])}))
    auto = AutoSampler(first, (0,))
    for number in range(12):
        (params,) = auto.ask(1, [])
        outcome = Outcome(state=TrialState.COMPLETE, loss=float(params["w"]), seconds=60.0)
        auto.tell([Trial(number=number, subspace="all", params=params, state=TrialState.COMPLETE, outcome=outcome)])
    auto.ask(1, [])
    assert auto.choice.startswith("gp: it predicts")


def test_samplers_of_many_combinations_repeat_no_log_line(caplog: pytest.LogCaptureFixture) -> None:
    choices = {f"c{place}": hp.choice(f"c{place}", [0, hp.uniform(f"x{place}", 0, 1)]) for place in range(7)}
    caplog.set_level(logging.INFO)
    subspaces = split(compile_space(choices))
    make_samplers(find_sampler("auto", 100, budgets=[1.0, 3.0]), subspaces, (0,))
    assert len(caplog.records) == 1


def test_several_losses_have_an_outlook_by_the_first_one() -> None:
    """Also if several results came at once, and the trials of the front are not the first ones."""
    search = Search("tpe", lambda params: 0.0)
    for number in range(19):
        subspace = search.subspaces[number % 3]
        (params,) = search.ask(subspace)
        # The latest trial has the worst first loss, and alone the best second one.
        losses = {"first": float(number), "second": -1e3 if number == 18 else float(number)}
        outcome = Outcome(state=TrialState.COMPLETE, loss=float(number), losses=losses, seconds=60.0)
        told = Trial(number=number, subspace=subspace.name, params=params, state=TrialState.COMPLETE, outcome=outcome)
        search.samplers[subspace.name].tell([told])
    outlook = search.whole.outlook(search.subspaces, 0)
    assert max(outlook.values()) == 1.0


def test_a_process_that_was_fitted_to_the_first_results_learns_all_of_them() -> None:
    """Fits become due without a new result if proposals need not be quick any more."""
    search = Search("gp", bowl)
    search.whole.is_quick = True
    for place in range(28):
        search.run(search.subspaces[place % 3], 1)
    search.whole.outlook(search.subspaces, 0)
    fitted = search.whole._fitted
    search.whole.is_quick = False
    search.ask(search.subspaces[0])
    assert 10 <= fitted < search.whole._fitted < 28
    assert len(search.whole._process.rows) == 28


@pytest.mark.parametrize(("subspaces", "allowed"), [(6, True), (64, False)])
def test_the_outlook_of_gp_takes_no_longer_than_a_proposal_may(subspaces: int, allowed: bool) -> None:
    assert allows_outlook(Decade(1.0).allowed_ms, subspaces, labels=5, results=50) is allowed
    assert allows_outlook(Decade(100.0).allowed_ms, subspaces, labels=5, results=50)
    assert not allows_outlook(Decade(0.1).allowed_ms, 1, labels=0, results=0)


@pytest.mark.parametrize(("name", "labels"), [("cma", [8, 2]), ("tpe", [9])])
def test_a_budget_has_enough_results_by_the_labels_of_one_subspace(name: str, labels: list[int]) -> None:
    """A sampler of the whole space counts the choice that leads to a subspace, too."""
    branches = [{str(i): hp.uniform(f"{place}{i}", 0, 1) for i in range(n)} for place, n in enumerate([8, 2])]
    subspaces = split(compile_space({"m": hp.choice("m", branches)}))
    samplers = make_samplers(find_sampler(name, budgets=[1.0, 3.0]), subspaces, (0,))
    inside = dict.fromkeys(each.sampler if isinstance(each, Unrepeated) else each for each in samplers.values())
    for sampler, count in zip(inside, labels, strict=True):
        told = [Trial(number=place, subspace=subspaces[labels.index(count)].name, budget=3.0, state=TrialState.COMPLETE,
                      params=subspaces[labels.index(count)].sample(np.random.default_rng(place), 1)[0],
                      outcome=Outcome(state=TrialState.COMPLETE, loss=float(place)))
                for place in range(max(LEAST, count + MORE))]  # fmt: skip
        sampler.tell(told[:-1])
        assert sampler.budget == 1.0  # type: ignore[attr-defined]
        sampler.tell(told[-1:])
        assert sampler.budget == 3.0  # type: ignore[attr-defined]


# Shares


def shares() -> PromiseShares:
    return PromiseShares({"good": 0.25, "middle": 0.25, "bad": 0.5})


def dealt(made: PromiseShares, trials: int) -> Counter[str]:
    counts: Counter[str] = Counter()
    for _ in range(trials):
        name = next(iter(made.backlogs()))
        made.deal(name)
        counts[name] += 1
    return counts


def test_trials_are_divided_by_the_outlook_and_all_subspaces_keep_some() -> None:
    made = shares()
    made.follow({"good": 1.0, "middle": 0.5, "bad": 0.0})
    counts = dealt(made, 600)
    # The floor is divided by the probabilities, the rest by probability times the outlook.
    wanted = {"good": 0.9 * 2 / 3 + 0.025, "middle": 0.9 / 3 + 0.025, "bad": 0.05}
    assert LED_FLOOR == 0.1
    for name, part in wanted.items():
        assert counts[name] / 600 == pytest.approx(part, abs=0.05)


def test_where_nothing_is_expected_of_any_subspace_trials_are_divided_evenly() -> None:
    made = shares()
    made.follow(dict.fromkeys(("good", "middle", "bad"), 0.0))
    assert dealt(made, 100)["bad"] == pytest.approx(50, abs=3)


def test_shares_do_not_depend_on_the_order_of_an_outlook_and_of_failures() -> None:
    """A resumed study gets all results before the first outlook."""
    one, two, outlook = shares(), shares(), {"good": 1.0, "middle": 0.5, "bad": 0.5}
    one.follow(outlook)
    for made in (one, two):
        for number in range(6):
            failed = Outcome(state=TrialState.FAILED)
            made.tell(Trial(number=number, subspace="good", params={}, state=TrialState.FAILED, outcome=failed))
    two.follow(outlook)
    assert one.backlogs() == two.backlogs()
    assert dealt(one, 100) == dealt(two, 100)


def test_the_least_gain_is_more_than_none() -> None:
    made = shares()
    made.follow({"good": 5e-324, "middle": 0.0, "bad": 0.0})
    assert dealt(made, 100)["good"] > 80


@pytest.mark.parametrize(("sampler", "expected"), [("gp", "promise"), ("tpe", "promise"), ("cma", "even")])
def test_samplers_that_learn_in_the_whole_space_choose_the_subspace_by_default(sampler: str, expected: str) -> None:
    assert StudySettings(sampler=sampler).shares_in_force == expected
