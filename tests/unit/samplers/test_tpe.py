"""TPE proposes lawful params, learns from good trials and from failed ones, and keeps its slots apart."""

from __future__ import annotations

import math
import tracemalloc
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from services.trials import search, told

from shadho_celery import minimize
from shadho_celery.core.trial import Outcome, Trial, TrialState
from shadho_celery.samplers.tpe import (
    MOST_BAD,
    MOST_GOOD,
    MOST_KEPT,
    MOST_RANDOM,
    Array,
    TpeSampler,
    _axis,
    _Gaussians,
    _Line,
    _Mixture,
    _Options,
    _Several,
)
from shadho_celery.space.compile import compile_space
from shadho_celery.space.domains import QLogNormal, QLogUniform, QNormal, QUniform, make_domain
from shadho_celery.space.split import Subspace, split
from shadho_celery.study.front import order_of

Params = Mapping[str, Any]

LAWS: dict[str, tuple[str, dict[str, Any]]] = {
    "uniform": ("uniform", {"low": -2, "high": 3}),
    "quniform": ("quniform", {"low": 1, "high": 10, "q": 4}),
    "loguniform": ("loguniform", {"low": -6, "high": 2}),
    "qloguniform": ("qloguniform", {"low": -1, "high": 4, "q": 3}),
    "normal": ("normal", {"mu": 5, "sigma": 2}),
    "qnormal": ("qnormal", {"mu": 5, "sigma": 2, "q": 2}),
    "lognormal": ("lognormal", {"mu": 0, "sigma": 1}),
    "qlognormal": ("qlognormal", {"mu": 1, "sigma": 1, "q": 1}),
    "randint": ("randint", {"low": 3, "high": 9}),
    "categorical": ("categorical", {"p": [0.5, 0.2, 0.3]}),
}


def every_law() -> dict[str, Any]:
    space = {
        name: getattr(hp, name)(name, *arguments.values())
        for name, (_, arguments) in LAWS.items()
        if name != "categorical"
    }
    return {**space, "categorical": hp.pchoice("categorical", [(0.5, "a"), (0.2, "b"), (0.3, "c")])}


def nested() -> Any:
    """A choice in an option of a choice; left unsplit here."""
    inner = hp.choice("inner", [hp.uniform("deep", 0, 1), {"n": hp.randint("n", 4)}, "nothing"])
    return {"top": hp.choice("top", [hp.uniform("shallow", 0, 1), inner]), "x": hp.uniform("x", 0, 1)}


def whole(space: Any) -> Subspace:
    """The undivided space as one subspace."""
    return split(compile_space(space), max_subspaces=1)[0]


def waiting(params: Params) -> Trial:
    return Trial(number=0, subspace="all", params=params)


def tpe(space: Any, seed: int = 0) -> TpeSampler:
    return TpeSampler(whole(space), (seed, 0))


# Several losses, and constraints


def test_of_several_losses_guesses_gather_along_the_front() -> None:
    # The front is where y is 0, whatever x.
    space = {"x": hp.uniform("x", 0, 1), "y": hp.uniform("y", 0, 1)}
    sampler = tpe(space)
    for _ in range(100):
        [params] = sampler.ask(1, [])
        losses = {"a": params["x"] + params["y"], "b": 1 - params["x"] + params["y"]}
        outcome = Outcome(state=TrialState.COMPLETE, loss=losses["a"], losses=losses)
        sampler.tell([told(params, 0.0).evolve(outcome=outcome)])
    asked = sampler.ask(40, [])
    assert np.median([params["y"] for params in asked]) < 0.15
    xs = [params["x"] for params in asked]
    assert min(xs) < 0.3
    assert max(xs) > 0.7


def test_of_many_trials_with_several_losses_the_best_are_found_among_a_bounded_number() -> None:
    """The work of a guess stays the same however many trials have ended: here ten times as many as are kept."""
    generator = np.random.default_rng(0)
    trials = generator.random((10 * MOST_KEPT, 2))
    several = _Several()
    for place, (a, b) in enumerate(trials.tolist()):
        several.add((0.0, -math.inf, a, place), (a, b), 0.0)
    assert len(several._kept) <= MOST_KEPT
    best = [place for *_, place in several.best(MOST_GOOD)]
    assert best == order_of(trials, np.zeros(len(trials)), MOST_GOOD).tolist()


def test_guesses_gather_where_constraints_are_kept() -> None:
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    for _ in range(60):
        [params] = sampler.ask(1, [])
        outcome = Outcome(state=TrialState.COMPLETE, loss=params["x"], constraints={"c": 0.6 - params["x"]})
        sampler.tell([told(params, 0.0).evolve(outcome=outcome)])
    assert 0.5 < np.median([params["x"] for params in sampler.ask(40, [])]) < 0.75


def test_labels_of_a_tree_are_drawn_by_themselves_for_several_losses() -> None:
    space = hp.choice("k", [{"u": hp.uniform("u", -2, 2)}, {"v": hp.loguniform("v", -7, 0), "n": hp.randint("n", 5)}])
    sampler = tpe(space)
    for _ in range(60):
        for params in sampler.ask(2, []):
            assert set(params) in ({"k", "u"}, {"k", "v", "n"})
            losses = {"a": params.get("u", 0.0) ** 2, "b": params.get("v", 2.0), "c": -params.get("n", 0.0)}
            outcome = Outcome(state=TrialState.COMPLETE, loss=losses["a"], losses=losses)
            sampler.tell([told(params, 0.0).evolve(outcome=outcome)])


# What is proposed


def test_the_same_seed_and_history_give_the_same_params() -> None:
    def history(seed: int) -> list[Params]:
        return search(tpe(nested(), seed), lambda p: p["x"] + p.get("deep", 0.5), 40)

    assert history(3) == history(3)
    assert history(3) != history(4)


def test_params_lie_in_their_laws_with_the_types_that_random_search_has() -> None:
    subspace = whole(every_law())
    types = {label: type(value) for label, value in subspace.sample(np.random.default_rng(0), 1)[0].items()}
    for params in search(TpeSampler(subspace, (0,)), lambda p: p["uniform"] ** 2 - p["randint"], 60):
        subspace.space.check(params)
        assert {label: type(value) for label, value in params.items()} == types
        for label, domain in subspace.domains.items():
            if isinstance(domain, QUniform | QLogUniform | QNormal | QLogNormal):
                assert params[label] == np.round(params[label] / domain.q) * domain.q


@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize(("label", "low", "high"), [("quniform", 0, 8), ("qloguniform", 0, 54), ("randint", 3, 8)])
def test_the_ends_of_a_grid_are_reached(label: str, low: int, high: int, sign: int) -> None:
    space = {label: every_law()[label]}
    values = {params[label] for params in search(tpe(space), lambda p: sign * p[label], 40)}
    assert (low if sign > 0 else high) in values
    assert all(low <= value <= high for value in values)


def test_only_active_labels_are_proposed() -> None:
    subspace = whole(nested())
    asked = search(TpeSampler(subspace, (0,)), lambda p: p["x"], 60)
    assert all(set(params) == set(subspace.space.active(params)) for params in asked)
    assert {params.get("inner") for params in asked} == {None, 0, 1, 2}


def test_pinned_choices_are_among_the_params() -> None:
    subspace = next(s for s in split(compile_space(nested())) if s.fixed == {"top": 1, "inner": 0})
    for params in search(TpeSampler(subspace, (0,)), lambda p: p["x"], 20):
        assert set(params) == {"top", "inner", "deep", "x"}
        assert subspace.contains(params)


def test_a_subspace_without_leaves_has_its_pinned_choices_only() -> None:
    space = compile_space(hp.choice("c", ["nothing", hp.uniform("x", 0, 1)]))
    assert search(TpeSampler(split(space)[0], (0,)), lambda p: 0.0, 30) == [{"c": 0}] * 30


# What is learnt


def test_guesses_gather_where_losses_are_low() -> None:
    asked = search(tpe({"x": hp.uniform("x", -10, 10), "y": hp.loguniform("y", -9, 0)}), lambda p: abs(p["x"] - 4), 60)
    late = [abs(params["x"] - 4) for params in asked[30:]]
    assert np.median(late) < 1.0  # of the prior it would be 5


def test_labels_that_work_together_are_drawn_together() -> None:
    """Two valleys, at (0, 0) and (1, 1): a product of one density per label would also draw from (0, 1) and (1, 0)."""
    space = {"x": hp.uniform("x", -0.5, 1.5), "y": hp.uniform("y", -0.5, 1.5)}

    def loss(p: Params) -> float:
        return min(math.hypot(p["x"] - place, p["y"] - place) for place in (0, 1))

    late = [loss(params) for seed in range(3) for params in search(tpe(space, seed), loss, 60)[30:]]
    assert np.median(late) < 0.25


def test_the_better_branch_is_taken_more_often() -> None:
    asked = search(tpe(nested()), lambda p: (p["deep"] - 0.3) ** 2 if "deep" in p else 1.0, 80)
    late = asked[40:]
    assert np.mean(["deep" in params for params in late]) > 0.5  # of the prior it would be a sixth


def test_a_branch_without_trials_is_drawn_from_its_law() -> None:
    sampler = tpe({"c": hp.choice("c", [hp.uniform("a", 0, 1), hp.uniform("b", 0, 1)])})
    for place in range(30):
        sampler.tell([told({"c": 0, "a": place / 30}, place)])
    unseen = np.array([p["b"] for p in sampler.ask(200, []) if "b" in p])
    assert len(unseen) > 20
    assert unseen.min() < 0.2
    assert unseen.max() > 0.8


def test_failures_are_left_even_before_the_first_success() -> None:
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    for place in range(30):
        sampler.tell([told({"x": place / 60}, TrialState.FAILED)])
    assert np.mean([p["x"] > 0.5 for p in sampler.ask(20, [])]) > 0.8


@pytest.mark.parametrize("state", [TrialState.PRUNED, TrialState.FAILED, TrialState.COMPLETE])
def test_only_a_completed_trials_loss_can_be_good(state: TrialState) -> None:
    loss = math.nan if state is TrialState.COMPLETE else -100.0
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    for place in range(30):
        sampler.tell([told({"x": 0.5 + place / 60}, 1.0 + place)])
        outcome = Outcome(state=state, loss=loss)
        sampler.tell([Trial(number=place, subspace="all", params={"x": place / 60}, state=state, outcome=outcome)])
    assert np.mean([p["x"] > 0.45 for p in sampler.ask(20, [])]) > 0.8


# Many slots, long histories


def test_slots_that_are_filled_at_once_get_different_params() -> None:
    """Pending trials count as bad, so later guesses avoid them."""
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    search(sampler, lambda p: abs(p["x"] - 0.5), 30)
    together = [params["x"] for params in sampler.ask(30, [])]
    one_by_one: list[Trial] = []
    while len(one_by_one) < 30:
        one_by_one.append(waiting(sampler.ask(1, one_by_one)[0]))
    assert len({trial.params["x"] for trial in one_by_one}) == len(set(together)) == 30
    # The densities are estimated anew for each of the latter, which changes little.
    assert np.std([trial.params["x"] for trial in one_by_one]) == pytest.approx(np.std(together), rel=0.5)
    assert np.ptp(together) > 0.5


def test_some_trials_cover_the_space_whatever_the_losses_say() -> None:
    """A narrow optimum far from all good trials is met by those that go on with the start."""
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    asked = search(sampler, lambda p: -2.0 if abs(p["x"] - 0.2) < 0.03 else -p["x"], 60)
    explored = sorted(params["x"] for index, params in enumerate(asked) if index < MOST_RANDOM or index % 4 == 0)
    assert np.diff(explored).max() < 0.1
    assert min(abs(params["x"] - 0.2) for params in asked) < 0.03


def test_nothing_is_proposed_twice_while_there_is_something_else() -> None:
    sampler = tpe({"c": hp.choice("c", list(range(4))), "n": hp.randint("n", 3)})
    asked = search(sampler, lambda p: p["c"], MOST_RANDOM)
    before = {tuple(params.values()) for params in asked}
    assert tuple(sampler.ask(1, [])[0].values()) not in before


def test_a_cancelled_trial_teaches_nothing() -> None:
    """But it has had its place in the stream."""
    samplers = [tpe(nested()) for _ in range(3)]
    for sampler in samplers:
        search(sampler, lambda p: p["x"], 20)
    for sampler, x in zip(samplers, (0.1, 0.9), strict=False):
        sampler.tell([told({"top": 0, "shallow": x, "x": x}, TrialState.CANCELLED)])
    asked = [sampler.ask(1, []) for sampler in samplers]
    assert asked[0] == asked[1] != asked[2]


def test_a_history_longer_than_is_looked_at_gives_the_same_guess_each_time() -> None:
    def guess() -> Params:
        sampler = tpe({"x": hp.uniform("x", 0, 1)})
        for place in range(4 * MOST_BAD):
            sampler.tell([told({"x": place / MOST_BAD / 4}, place)])
        return sampler.ask(2, [])[1]

    assert guess() == guess()
    assert guess()["x"] < 0.2


def test_more_slots_than_is_looked_at_are_filled() -> None:
    sampler = tpe({"x": hp.uniform("x", 0, 1)})
    search(sampler, lambda p: p["x"], MOST_RANDOM)
    assert len({params["x"] for params in sampler.ask(MOST_BAD + 20, [])}) == MOST_BAD + 20


# Densities


def grid(name: str) -> tuple[Sequence[float], float]:
    """All values of a law, finely spaced where it is continuous, and the mass of each unit of density."""
    domain = make_domain(name, *LAWS[name])
    if name == "categorical":
        return [0, 1, 2], 1.0
    units = (np.arange(20_000) + 0.5) / 20_000
    values = domain.quantile(units) if name == "randint" else domain.from_unit(units)
    is_grid = name.startswith("q") or name == "randint"
    return (sorted(set(values.tolist())), 1.0) if is_grid else (values.tolist(), 1 / 20_000)


def densities(name: str, values: Sequence[float], centres: Array, narrowing: Array) -> Array:
    """The kernels of some trials' values, each at `values`, shape (values, centres)."""
    axis, at = _axis(make_domain(name, *LAWS[name])), np.array(values, dtype=float)
    if isinstance(axis, _Options) or axis.is_grid:
        return np.exp(axis.kernels(centres, narrowing).logarithms(at))
    return np.exp(_Gaussians([axis], centres[:, None], narrowing).log_products(at[:, None]))


def draws(name: str, centres: Array, narrowing: Array, picks: Array, generator: np.random.Generator) -> Array:
    """Draws from the kernels of some trials' values, one for each pick."""
    axis = _axis(make_domain(name, *LAWS[name]))
    if isinstance(axis, _Options) or axis.is_grid:
        return axis.kernels(centres, narrowing).draw(picks, generator)
    gaussians = _Gaussians([axis], centres[:, None], narrowing)
    return gaussians.quantiles(picks, generator.random((1, len(picks))))[:, 0]


@pytest.mark.parametrize("name", LAWS)
def test_every_kernel_is_a_density(name: str) -> None:
    """Its mass is 1: over the values of a grid, over the unscaled variable of a continuum; and the prior's too."""
    values, mass = grid(name)
    centres = np.array([values[0], values[len(values) // 2], values[-1], math.nan])
    kernels = densities(name, values, centres, np.full(4, 0.7))
    assert kernels.shape == (len(values), 4)
    np.testing.assert_allclose(kernels.sum(axis=0) * mass, 1.0, rtol=1e-3)


@pytest.mark.parametrize("name", LAWS)
def test_what_one_more_trial_adds_to_a_mixture_is_its_part_of_the_mass_and_lies_at_its_value(name: str) -> None:
    values, mass = grid(name)
    points, at = np.array(values, dtype=float)[:, None], values[len(values) // 3]
    mixture = _Mixture([_axis(make_domain(name, *LAWS[name]))], np.array([[values[0]], [values[-1]], [math.nan]]))
    added = np.exp(mixture.log_part([float(at)], points))
    assert added.sum() * mass == pytest.approx(1 / 3, rel=1e-3)
    assert added[len(values) // 3] > 2 * max(added[0], added[-1])


def test_kernels_of_many_labels_are_those_of_each_label() -> None:
    """Also if the labels are inactive in different trials."""
    axes = [each for name in LAWS if isinstance(each := _axis(make_domain(name, *LAWS[name])), _Line)]
    axes = [each for each in axes if not each.is_grid]
    assert len(axes) >= 3
    generator, narrowing = np.random.default_rng(0), np.full(20, 0.7)
    centres = np.array([axis.from_unit(generator.random(20)) for axis in axes]).T
    some = np.where(generator.random(centres.shape) < 0.3, math.nan, centres)
    for rows in (centres, some):
        together = _Gaussians(axes, rows, narrowing).log_products(some)
        apart = [
            _Gaussians([axis], rows[:, [place]], narrowing).log_products(some[:, [place]])
            for place, axis in enumerate(axes)
        ]
        np.testing.assert_allclose(together, sum(apart), rtol=1e-9)


@pytest.mark.parametrize("name", LAWS)
def test_draws_follow_their_kernel(name: str) -> None:
    values, mass = grid(name)
    centres, narrowing = np.array([values[len(values) // 3], math.nan]), np.full(2, 0.7)
    size = 4000
    for kernel in (0, 1):
        drawn = draws(name, centres, narrowing, np.full(size, kernel), np.random.default_rng(1))
        density = densities(name, values, centres, narrowing)[:, kernel] * mass
        for part in (0.25, 0.5, 0.75):
            edge = values[int(part * (len(values) - 1))]
            assert np.mean(drawn <= edge) == pytest.approx(density[np.array(values) <= edge].sum(), abs=0.03)


# As part of a search


def test_a_choice_of_ten_thousand_options_takes_little_memory() -> None:
    """A kernel for every pair of options would take 2.4 GB."""
    subspace = whole({"option": hp.choice("option", list(range(10_000))), "x": hp.uniform("x", 0, 1)})
    tracemalloc.start()
    try:
        sampler = TpeSampler(subspace, [1])
        for index in range(MOST_RANDOM + 5):
            sampler.tell([told(sampler.ask(1, [])[0], float(index))])
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < 30e6


def test_an_options_kernel_is_the_mixture_of_its_own_and_the_law() -> None:
    axis = _axis(make_domain("label", "categorical", {"p": [0.5, 0.2, 0.3]}))
    masses = np.exp(axis.kernels(np.array([1.0, math.nan]), np.ones(2)).logarithms(np.arange(3.0)))
    assert masses[:, 0] == pytest.approx([0.1, 0.84, 0.06])
    assert masses[:, 1] == pytest.approx([0.5, 0.2, 0.3])


def test_minimize_finds_a_narrow_optimum_in_one_branch() -> None:
    space = hp.choice(
        "branch", [{"a": hp.uniform("a", 0, 1)}, {"x": hp.uniform("x", 0, 1), "y": hp.uniform("y", 0, 1)}]
    )

    def objective(params: Any) -> float:
        if "a" in params:
            return 0.5 + float(params["a"])
        return 1.0 - math.exp(-20 * ((params["x"] - 0.7) ** 2 + (params["y"] - 0.2) ** 2))

    best = {name: minimize(objective, space, trials=60, seed=1, sampler=name).best for name in ("tpe", "random")}
    assert best["tpe"] is not None
    assert best["random"] is not None
    assert best["tpe"].params["branch"] == 1
    assert (best["tpe"].loss or 0.0) < (best["random"].loss or 0.0)
