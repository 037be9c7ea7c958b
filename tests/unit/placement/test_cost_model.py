"""Predicted seconds and bytes follow what trials took: by subspace, class, params and budget, whatever goes wrong."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hyperopt import hp
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec.structs import replace

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.core.trial import Memory, Outcome, Trial, TrialState
from shadho_celery.placement.durations import Elapsed
from shadho_celery.placement.model import COMPLEXITY_RATIO, LEAST_SECONDS, CostModel, declared_cost
from shadho_celery.space import features
from shadho_celery.space.compile import compile_space
from shadho_celery.space.features import Array
from shadho_celery.space.split import split

S = TrialState

SPACE = compile_space(
    hp.choice(
        "model",
        [
            {"name": "net", "width": hp.loguniform("width", 0, 5), "rate": hp.uniform("rate", 0, 1)},
            {"name": "svm", "C": hp.lognormal("C", 0, 2)},
            {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10), "split": hp.choice("split", ["a", "b"])},
        ],
    )
)
SUBSPACES = split(SPACE)
NAMES = [subspace.name for subspace in SUBSPACES]
NET, SVM, FOREST = NAMES
CLASSES = ["gpu", "cpu"]
#: log seconds by pair: rank one
ROW, COLUMN = {NET: 4.0, SVM: 1.0, FOREST: 2.0}, {"gpu": -1.0, "cpu": 0.5}

Seconds = Callable[[Trial, np.random.Generator], float]


def by_pair(trial: Trial, generator: np.random.Generator) -> float:
    """Lognormal about the pair's own time; params do not matter."""
    return float(math.exp(ROW[trial.subspace] + COLUMN[str(trial.compute_class)]) * generator.lognormal(0, 0.4))


def by_width(trial: Trial, generator: np.random.Generator) -> float:
    """In proportion to a net's width, which ranges over a factor of 150."""
    return by_pair(trial, generator) * float(trial.params.get("width", 1.0))


def drawn(name: str, generator: np.random.Generator, n: int = 1) -> list[dict[str, Any]]:
    return next(s for s in SUBSPACES if s.name == name).sample(generator, n)


def fresh(name: str, compute_class: str, generator: np.random.Generator, **values: Any) -> Trial:
    params = values.pop("params", None) or drawn(name, generator)[0]
    return ended(name, params, compute_class, **{"loss": 0.5, **values})


def ended(
    subspace: str,
    params: Mapping[str, Any],
    compute_class: str,
    *,
    state: TrialState = S.COMPLETE,
    loss: float | None = None,
    seconds: float | None = None,
    memory: int | None = None,
    **values: Any,
) -> Trial:
    return Trial(
        **{"number": 0, **values},
        subspace=subspace,
        params=params,
        compute_class=compute_class,
        state=state,
        outcome=Outcome(state=state, loss=loss, seconds=seconds, memory=memory),
    )


def measured(trial: Trial, **measures: Any) -> Trial:
    """The trial with another outcome."""
    return trial.evolve(outcome=replace(trial.outcome, **measures))


def trials_of(seconds: Seconds, n: int, seed: int = 0) -> list[Trial]:
    """`n` trials of every pair, by turns."""
    generator = np.random.default_rng(seed)
    trials = []
    for _ in range(n):
        for name in NAMES:
            for c in CLASSES:
                trial = fresh(name, c, generator)
                trials.append(measured(trial, seconds=seconds(trial, generator)))
    return trials


def seconds_of(
    model: CostModel,
    name: str,
    compute_class: str,
    params_list: Sequence[Mapping[str, Any]],
    budget: float | None = None,
) -> Array:
    """Predicted median seconds of sets of params on a class."""
    trials = [Trial(number=0, subspace=name, params=params, budget=budget) for params in params_list]
    return np.exp(model.predict(trials, [compute_class]).mean[:, 0])


def told(trials: list[Trial], model: CostModel | None = None) -> CostModel:
    model = model or CostModel(SUBSPACES)
    for trial in trials:
        model.tell(trial)
    return model


def medians(model: CostModel) -> np.ndarray[Any, np.dtype[np.float64]]:
    """Median of the predicted seconds of some trials of every pair."""
    middle = {s.name: s.sample(np.random.default_rng(9), 20) for s in SUBSPACES}
    return np.array([[np.median(seconds_of(model, n, c, middle[n])) for c in CLASSES] for n in NAMES])


TRUE = np.exp([[ROW[name] + COLUMN[c] for c in CLASSES] for name in NAMES])

# Before there are trials


def efficiencies(model: CostModel, classes: Sequence[str], optimism: float = 0.0) -> dict[str, dict[str, float]]:
    """By class and subspace, the fastest class's seconds over this class's."""
    logs = model.costs(model.typical(), classes, optimism).log_seconds
    ratios = {s.name: np.exp(row.min() - row).tolist() for s, row in zip(SUBSPACES, logs, strict=True)}
    return {c: {name: row[place] for name, row in ratios.items()} for place, c in enumerate(classes)}


def test_before_any_trial_the_seconds_follow_the_rank_of_complexity_about_one_second() -> None:
    model = CostModel(SUBSPACES)
    ordered = sorted(SUBSPACES, key=lambda s: features.complexity(s.domains.values()))
    generator = np.random.default_rng(0)
    guesses = [seconds_of(model, s.name, "cpu", drawn(s.name, generator))[0] for s in ordered]
    assert guesses == pytest.approx([COMPLEXITY_RATIO**-0.5, 1.0, COMPLEXITY_RATIO**0.5])


def test_before_any_trial_one_subspace_is_in_the_middle() -> None:
    subspaces = split(compile_space({"x": hp.uniform("x", 0, 1)}))
    seconds = seconds_of(CostModel(subspaces), subspaces[0].name, "cpu", [{"x": 0.5}])
    assert seconds[0] == pytest.approx(1.0)


def test_before_any_trial_a_cost_declared_by_name_says_how_subspaces_compare() -> None:
    declared = declared_cost({NET: 100.0, SVM: 1.0}, SPACE, SUBSPACES)
    guesses = medians(CostModel(SUBSPACES, declared))
    assert guesses[:, 0] == pytest.approx([100.0, 1.0, 10.0])
    assert guesses[:, 1] == pytest.approx(guesses[:, 0])


def test_before_any_trial_a_cost_declared_by_function_says_how_params_compare() -> None:
    declared = declared_cost(lambda params: params.get("width", 1.0), SPACE, SUBSPACES)
    params = [{"model": 0, "width": width, "rate": 0.5} for width in (1.0, 10.0, 100.0)]
    seconds = seconds_of(CostModel(SUBSPACES, declared), NET, "gpu", params)
    assert seconds == pytest.approx([1.0, 10.0, 100.0])


def test_a_first_trial_is_news_of_all_pairs() -> None:
    """The declared cost keeps their proportions."""
    model = CostModel(SUBSPACES, declared_cost({NET: 100.0, SVM: 1.0, FOREST: 10.0}, SPACE, SUBSPACES))
    model.tell(fresh(SVM, "cpu", np.random.default_rng(0), seconds=50.0))
    assert medians(model)[:, 0] == pytest.approx([5000.0, 50.0, 500.0], rel=0.3)


def test_a_wrong_declared_cost_is_outweighed_by_what_trials_take() -> None:
    declared = declared_cost({NET: 1e-3, SVM: 1e6, FOREST: 1.0}, SPACE, SUBSPACES)
    model = told(trials_of(by_pair, 40), CostModel(SUBSPACES, declared))
    assert medians(model) == pytest.approx(TRUE, rel=0.3)


def test_before_any_trial_all_classes_are_equal_and_memory_is_unknown() -> None:
    model = CostModel(SUBSPACES)
    assert efficiencies(model, CLASSES) == {c: dict.fromkeys(NAMES, 1.0) for c in CLASSES}
    assert [model.timed(c) for c in CLASSES] == [0, 0]
    assert model.memory(NET, drawn(NET, np.random.default_rng(0)), ALL) is None


# Seconds


def test_the_median_is_that_of_the_pair() -> None:
    assert medians(told(trials_of(by_pair, 60))) == pytest.approx(TRUE, rel=0.25)


def test_a_pair_that_was_never_tried_is_predicted_from_the_others() -> None:
    trials = [t for t in trials_of(by_pair, 60) if (t.subspace, t.compute_class) != (NET, "cpu")]
    assert medians(told(trials))[0, 1] == pytest.approx(TRUE[0, 1], rel=0.35)


def relative_errors(model: CostModel, seconds: Seconds, name: str = NET) -> tuple[float, float]:
    """Median relative errors on fresh trials: the model's, and those of the pair's own median."""
    new = [trial for trial in trials_of(seconds, 150, 77) if trial.subspace == name]
    old = [trial for trial in trials_of(seconds, 400, 78) if trial.subspace == name]
    plain = {c: np.median([t.outcome.seconds or 0.0 for t in old if t.compute_class == c]) for c in CLASSES}
    errors = []
    for trial in new:
        truth, c = trial.outcome.seconds or 0.0, str(trial.compute_class)
        predicted = seconds_of(model, name, c, [trial.params])[0]
        errors.append((abs(predicted - truth) / truth, abs(plain[c] - truth) / truth))
    ours, theirs = np.median(errors, axis=0)
    return float(ours), float(theirs)


def test_where_params_matter_the_prediction_beats_the_pairs_median() -> None:
    model = told(trials_of(by_width, 200))
    ours, plain = relative_errors(model, by_width)
    assert ours < 0.75 * plain
    narrow, wide = ({"model": 0, "width": width, "rate": 0.5} for width in (1.5, 100.0))
    low, high = seconds_of(model, NET, "cpu", [narrow, wide])
    assert high > 10 * low


def test_where_params_do_not_matter_nothing_is_lost_by_having_them() -> None:
    ours, plain = relative_errors(told(trials_of(by_pair, 200)), by_pair)
    assert ours < 1.15 * plain


def test_a_budget_scales_the_seconds_and_full_ones_can_be_told_beside_it() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for budget in (1.0, 9.0, 81.0) * 40:
        trial = fresh(SVM, "cpu", generator, budget=budget)
        model.tell(measured(trial, seconds=budget * 2.0 * generator.lognormal(0, 0.2)))
    for budget in (1.0, 3.0, 27.0, 81.0):
        predicted = seconds_of(model, SVM, "cpu", drawn(SVM, generator), budget=budget)[0]
        assert predicted == pytest.approx(2.0 * budget, rel=0.3)


# What must not disturb it


@pytest.mark.parametrize("state", [S.FAILED, S.PRUNED, S.CANCELLED])
def test_trials_that_did_not_run_to_their_end_move_nothing(state: TrialState) -> None:
    model = told(trials_of(by_pair, 30))
    before, version = medians(model), model.durations.version
    generator = np.random.default_rng(0)
    for name in NAMES:
        for _ in range(50):
            model.tell(fresh(name, "gpu", generator, state=state, seconds=1e6, memory=2**40))
            model.tell(fresh(name, "unheard of", generator, state=state, seconds=1e-6))
    assert (medians(model) == before).all()
    assert model.durations.version == version
    assert model.memory(NET, drawn(NET, generator), ALL) is None


def test_trials_that_tell_nothing_move_nothing() -> None:
    """Such as those whose seconds an executor, or a clock that was set back, has got wrong."""
    model = told(trials_of(by_pair, 30))
    before = medians(model)
    generator = np.random.default_rng(0)
    strange: list[Mapping[str, Any]] = [
        *({"outcome": Outcome(state=S.COMPLETE, loss=0.5, seconds=each)} for each in (None, math.nan, math.inf, -1.0)),
        {"compute_class": None},
        {"subspace": "of an older version"},
    ]
    for changes in strange * 20:
        model.tell(fresh(SVM, "gpu", generator, seconds=1e6).evolve(**changes))
    assert (medians(model) == before).all()


def test_the_same_trials_give_the_same_predictions_to_the_bit() -> None:
    one, other = told(trials_of(by_width, 60)), told(trials_of(by_width, 60))
    assert (medians(one) == medians(other)).all()
    assert efficiencies(one, CLASSES, 1.0) == efficiencies(other, CLASSES, 1.0)


@settings(max_examples=40)
@given(
    st.lists(
        st.tuples(
            st.sampled_from(NAMES),
            st.sampled_from([*CLASSES, "late"]),
            st.one_of(st.sampled_from([0.0, 1e-9, 1e9, None]), st.floats(0, 1e9)),
            st.sampled_from([None, 1, 2**30, 2**45]),
            st.sampled_from([None, 1e-3, 1.0, 1e6]),
        ),
        max_size=60,
    )
)
def test_whatever_it_is_told_predictions_are_finite(news: list[tuple[Any, ...]]) -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for name, c, seconds, memory, budget in news:
        model.tell(fresh(name, c, generator, seconds=seconds, memory=memory, budget=budget))
    for name in NAMES:
        for budget in (None, 0.01, 1e4):
            params = drawn(name, generator, 3)
            predicted = seconds_of(model, name, "gpu", params, budget=budget)
            assert predicted.shape == (3,)
            assert np.isfinite(predicted).all()
            assert (predicted > 0).all()
            needed = model.memory(name, params, ALL, budget=budget)
            assert needed is None or (np.isfinite(needed).all() and (needed > 0).all())
    for by_name in efficiencies(model, [*CLASSES, "late"], 1.0).values():
        assert set(by_name) == set(NAMES)
        assert all(0 < value <= 1 for value in by_name.values())


def test_zero_seconds_count_as_very_few() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for _ in range(50):
        model.tell(fresh(SVM, "cpu", generator, seconds=0.0))
    predicted = seconds_of(model, SVM, "cpu", drawn(SVM, generator))[0]
    assert predicted == pytest.approx(LEAST_SECONDS, rel=0.2)


@pytest.mark.slow
def test_thousands_of_params_are_predicted_from() -> None:
    subspaces = split(compile_space({f"x{i}": hp.uniform(f"x{i}", 0, 1) for i in range(2000)}))
    model = CostModel(subspaces)
    draws = subspaces[0].sample(np.random.default_rng(0), 60)
    for params in draws:
        model.tell(ended("all", params, "cpu", seconds=7.0))
    predicted = seconds_of(model, "all", "cpu", draws)
    assert predicted == pytest.approx(np.full(60, 7.0), rel=0.05)


def test_an_inactive_param_of_a_conditional_choice_is_no_obstacle() -> None:
    space = compile_space({"x": hp.uniform("x", 0, 1), "y": hp.choice("y", [None, {"z": hp.uniform("z", 0, 1)}])})
    subspaces = split(space, max_subspaces=1)
    model = CostModel(subspaces)
    for params in subspaces[0].sample(np.random.default_rng(0), 80):
        model.tell(ended("all", params, "cpu", seconds=100.0 if "z" in params else 1.0))
    short, long = seconds_of(model, "all", "cpu", [{"x": 0.5, "y": 0}, {"x": 0.5, "y": 1, "z": 0.5}])
    assert long > 20 * short


def test_an_unknown_subspace_is_a_key_error_and_an_unknown_class_a_middling_one() -> None:
    model = told(trials_of(by_pair, 40))
    params = drawn(SVM, np.random.default_rng(0))
    with pytest.raises(KeyError):
        seconds_of(model, "nothing", "cpu", params)
    fast, slow, unheard = (seconds_of(model, SVM, c, params)[0] for c in ("gpu", "cpu", "unheard of"))
    assert fast * 0.8 < unheard < slow * 1.2


def test_no_params_ask_for_no_predictions() -> None:
    assert seconds_of(told(trials_of(by_width, 60)), NET, "cpu", []).shape == (0,)


# Classes


def test_efficiencies_are_the_fastest_classs_seconds_over_ones_own() -> None:
    model = told(trials_of(by_pair, 100))
    found = efficiencies(model, CLASSES)
    assert list(found["gpu"].values()) == [1.0] * 3
    for name in NAMES:
        assert found["cpu"][name] == pytest.approx(math.exp(-1.5), rel=0.2)
    assert efficiencies(model, ["cpu"]) == {"cpu": dict.fromkeys(NAMES, 1.0)}


def test_optimism_favours_the_pair_that_is_known_least() -> None:
    trials = [t for t in trials_of(by_pair, 60) if (t.subspace, t.compute_class) != (NET, "cpu")]
    model = told(trials)
    plain, hopeful = (efficiencies(model, CLASSES, optimism)["cpu"] for optimism in (0.0, 1.0))
    gain = {name: hopeful[name] / plain[name] for name in NAMES}
    assert max(gain, key=gain.__getitem__) == NET
    assert gain[NET] > 1.05


def test_typical_trials_order_the_classes_and_timed_counts_their_trials() -> None:
    model = told(trials_of(by_pair, 40))
    gpu, unheard, cpu = model.costs(model.typical(), ["gpu", "unheard of", "cpu"]).log_seconds.mean(axis=0)
    assert cpu - gpu == pytest.approx(1.5, abs=0.3)
    assert gpu < unheard < cpu
    assert [model.timed(c) for c in ("gpu", "cpu", "unheard of")] == [120, 120, 0]


# Memory


#: classes that the tests measure memory on
ALL = ("gpu", "cpu")


def memory_of(model: CostModel, name: str, **options: Any) -> float:
    needed = model.memory(name, drawn(name, np.random.default_rng(0)), options.pop("classes", ALL), **options)
    assert needed is not None
    return float(needed[0])


@pytest.mark.parametrize("trials", [1, 19])
def test_memory_is_that_of_the_subspaces_trials_from_the_first_on(trials: int) -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for _ in range(trials):
        model.tell(fresh(NET, "gpu", generator, memory=int(8e9 * generator.lognormal(0, 0.1))))
    assert memory_of(model, NET) == pytest.approx(8e9, rel=0.25)
    assert model.memory(SVM, drawn(SVM, generator), ALL) is None


def test_a_gpus_memory_and_the_hosts_are_kept_apart() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for _ in range(30):
        model.tell(fresh(NET, "gpu", generator, memory=10**10))
        model.tell(fresh(NET, "cpu", generator, memory=10**8))
        model.tell(fresh(SVM, "cpu", generator, memory=10**7))
    assert memory_of(model, NET, classes=["gpu"]) == pytest.approx(1e10, rel=0.01)
    assert memory_of(model, NET, classes=["cpu"]) == pytest.approx(1e8, rel=0.01)
    assert memory_of(model, NET, classes=["gpu", "cpu"]) == pytest.approx(1e10, rel=0.01)
    assert memory_of(model, SVM, classes=["cpu", "another"]) == pytest.approx(1e7, rel=0.01)
    assert model.memory(SVM, drawn(SVM, generator), ["gpu"]) is None


def test_memory_follows_the_params_where_they_matter() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for _ in range(300):
        trial = fresh(NET, "gpu", generator)
        model.tell(measured(trial, memory=int(1e7 * trial.params["width"])))
    params = [{"model": 0, "width": width, "rate": 0.5} for width in (2.0, 100.0)]
    needed = model.memory(NET, params, ALL)
    assert needed is not None
    assert needed == pytest.approx(np.array([2e7, 1e9]), rel=0.4)


def test_memory_that_was_not_measured_teaches_nothing() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    for memory in (None, 0):
        model.tell(fresh(NET, "gpu", generator, seconds=1.0, memory=memory))
    assert model.memory(NET, drawn(NET, generator), ALL) is None


# The version


def test_running_trials_may_be_of_classes_that_were_never_heard_of() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    trial = fresh(NET, "never heard of", generator).evolve(state=TrialState.COMPLETE)
    model.watch([Elapsed(trial, 900.0)])
    assert model.timed("never heard of") == 0
    median = seconds_of(model, NET, "never heard of", [trial.params])
    assert median[0] > seconds_of(CostModel(SUBSPACES), NET, "another", [trial.params])[0]


def test_the_params_of_trials_that_run_unusually_long_are_learned_from() -> None:
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    narrow, wide = ({"model": 0, "width": width, "rate": 0.5} for width in (2.0, 100.0))
    told([fresh(NET, "cpu", generator, seconds=10.0) for _ in range(40)], model)

    def ratio() -> float:
        low, high = np.log(seconds_of(model, NET, "cpu", [narrow, wide]))
        return float(high - low)

    before = ratio()
    running = [fresh(NET, "cpu", generator, params=wide) for _ in range(5)]
    model.watch([Elapsed(trial, 500.0) for trial in running])
    assert ratio() > before + 1.0
    model.watch([Elapsed(trial, 0.2, is_total=True) for trial in running])
    assert ratio() < before - 1.0


def test_what_reports_show_of_running_trials_is_learned_before_they_end() -> None:
    """They are much faster than the trials before; those that have merely run as long so far show nothing."""
    generator = np.random.default_rng(0)
    model = CostModel(SUBSPACES)
    told([fresh(NET, "cpu", generator, seconds=1000.0) for _ in range(4)], model)
    running = [fresh(NET, "cpu", generator) for _ in range(20)]

    def median(*, is_total: bool) -> float:
        model.watch([Elapsed(trial, 10.0, is_total=is_total) for trial in running])
        return float(np.median(seconds_of(model, NET, "cpu", [trial.params for trial in running])))

    assert median(is_total=False) > 500
    assert median(is_total=True) < 250


# Out of memory, without a byte known

SIZES = ["small", "middling", "large"]
GPU, HOST = Memory.GPU, Memory.HOST


def net(width: float, number: int = 0) -> Trial:
    params = next(p for p in drawn(NET, np.random.default_rng(0)))
    return Trial(number=number, subspace=NET, params={**params, "width": width})


def ended_net(width: float, compute_class: str, number: int = 0, **values: Any) -> Trial:
    return ended(NET, net(width).params, compute_class, number=number, seconds=1.0, **values)


def test_a_trial_that_ran_out_of_memory_is_counted_once_though_told_again_when_it_ends() -> None:
    once, twice = CostModel(SUBSPACES), CostModel(SUBSPACES)
    trial = ended_net(140.0, "large", 7, outgrown="small,middling", outgrown_memory="host,host")
    once.tell(trial)
    twice.tell_out_of_memory(trial, "small", HOST)
    twice.tell_out_of_memory(trial, "middling", HOST)
    twice.tell(trial)
    chances = [[m.bounds[NET, HOST].chance(net(100.0).params, name, SIZES) for name in SIZES] for m in (once, twice)]
    assert chances[0] == chances[1]
    assert chances[0][0] > chances[0][2] == 0.0


def test_the_bounds_of_the_two_memories_are_learned_apart() -> None:
    model = CostModel(SUBSPACES)
    model.tell_out_of_memory(net(140.0), "middling", GPU)
    assert model.bounds[NET, GPU].chance(net(140.0).params, "small", SIZES) > 0.5
    assert model.bounds[NET, HOST].chance(net(140.0).params, "small", SIZES) == 0.0
    model.tell_out_of_memory(net(140.0), "middling", HOST)
    assert model.bounds[NET, HOST].chance(net(140.0).params, "small", SIZES) > 0.5


def test_the_peaks_of_the_two_memories_are_learned_apart() -> None:
    trials = [ended_net(50.0, "large", number) for number in range(20)]
    model = told([t.evolve(outcome=replace(t.outcome, memory=2**30, gpu_memory=2**35)) for t in trials if t.outcome])
    for memory, peak in ((HOST, 2**30), (GPU, 2**35)):
        found = model.memory(NET, [net(50.0).params], ["large"], memory)
        assert found is not None
        assert float(found[0]) == pytest.approx(peak, rel=0.01)


def test_the_seconds_of_an_attempt_that_continued_an_interrupted_one_are_not_learned() -> None:
    generator = np.random.default_rng(0)
    trial = fresh(NAMES[0], CLASSES[0], generator, seconds=60.0)
    for continued, learned in ((True, 0), (False, 1), (None, 1)):
        model = told([measured(trial, continued=continued)])
        assert model.timed(CLASSES[0]) == learned


def test_with_searched_widths_a_class_costs_the_slot_seconds_of_its_best_width() -> None:
    costs = CostModel(SUBSPACES, declared_cost(lambda params: 1.0, SPACE, SUBSPACES), widths=[1, 2, 4])
    costs.see([ComputeClass(name="gpu", slots=4), ComputeClass(name="cpu", slots=2)])
    assert (costs.widths_on("gpu"), costs.widths_on("cpu")) == ([1, 2, 4], [1, 2])
    generator = np.random.default_rng(0)
    for _ in range(30):
        for slots, seconds in ((1, 400.0), (2, 100.0), (4, 90.0)):
            costs.tell(fresh(NET, "gpu", generator, slots=slots, seconds=seconds))
    [logs] = costs.costs([fresh(NET, "gpu", generator)], ["gpu"]).log_seconds
    assert logs == pytest.approx(math.log(200.0), abs=0.1)
    params = drawn(NET, generator, 3)
    waiting = [Trial(number=place, subspace=NET, params=each) for place, each in enumerate(params)]
    found, evidence = costs.slot_seconds(waiting, "gpu")
    assert found == pytest.approx(np.tile([400.0, 200.0, 360.0], (3, 1)), rel=0.2)
    assert evidence.tolist() == [[30, 30, 30]] * 3
