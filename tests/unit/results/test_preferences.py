"""Trials that go to classes by a param are told by that param, and chance is not taken for a law."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from shadho_celery.core.trial import Outcome, Params, Trial, TrialState
from shadho_celery.results.report import LEAST_TRIALS, preferences


def shown(trial: Trial, label: str) -> Any:
    return trial.params[label]


def slower_on_gpu(params: Params, compute_class: str) -> float:
    """Seconds that grow with the width on one class only."""
    return 1.0 + float(params.get("width", 0)) / 1000 if compute_class == "gpu" else 1.0


def placed(
    count: int,
    draw: Callable[[np.random.Generator], Params],
    place: Callable[[Params], str],
    seconds: Callable[[Params, str], float] = slower_on_gpu,
) -> list[Trial]:
    """Trials with the params that `draw` draws, on the classes that `place` gives."""
    generator = np.random.default_rng(0)
    trials = []
    for number in range(count):
        params = draw(generator)
        chosen = place(params)
        outcome = Outcome(state=TrialState.COMPLETE, loss=1.0, seconds=seconds(params, chosen))
        facts = {"number": number, "subspace": "all", "params": params, "state": TrialState.COMPLETE}
        trials.append(Trial(**facts, outcome=outcome, compute_class=chosen))  # type: ignore[arg-type]
    return trials


def test_a_number_is_cut_into_ranges_and_neighbours_of_one_class_are_one() -> None:
    def draw(generator: np.random.Generator) -> Params:
        return {"rate": generator.uniform(), "width": int(generator.integers(1, 1000))}

    [found] = preferences(placed(600, draw, lambda params: "gpu" if params["width"] > 500 else "cpu"), shown)
    assert (found.subspace, found.label) == ("all", "width")
    assert [part.compute_class for part in found.parts] == ["cpu", "gpu"]
    assert [part.share for part in found.parts] == [pytest.approx(1.0, abs=0.05)] * 2
    assert sum(part.trials for part in found.parts) == 600
    assert str(found) == "width 1 to 517 -> cpu 95 %, 524 to 998 -> gpu 100 %"


def test_options_are_named_by_the_class_they_go_to_whatever_their_order() -> None:
    def draw(generator: np.random.Generator) -> Params:
        return {"net": str(generator.choice(["vgg", "alex", "res", "mlp", "cnn", "rnn", "gru"]))}

    [found] = preferences(placed(200, draw, lambda params: "gpu" if params["net"] in {"vgg", "alex"} else "cpu"), shown)
    assert str(found) == "net cnn, gru, mlp, res and 1 more -> cpu 100 %, alex, vgg -> gpu 100 %"


def test_of_few_trials_or_one_class_or_chance_nothing_is_said() -> None:
    def draw(generator: np.random.Generator) -> Params:
        return {"width": int(generator.integers(1, 1000)), "on": bool(generator.integers(2))}

    chance = np.random.default_rng(1)
    assert preferences(placed(1000, draw, lambda params: str(chance.choice(["gpu", "cpu"]))), shown) == []
    assert preferences(placed(1000, draw, lambda params: "cpu"), shown) == []
    few = placed(LEAST_TRIALS - 1, draw, lambda params: "gpu" if params["width"] > 500 else "cpu")
    assert preferences(few, shown) == []
    assert preferences([], shown) == []
    assert (
        preferences(placed(500, lambda generator: {}, lambda params: str(chance.choice(["gpu", "cpu"]))), shown) == []
    )


def test_numbers_that_are_none_and_lists_are_options() -> None:
    def draw(generator: np.random.Generator) -> Params:
        return {"o": [float("nan"), [1, 2], None, 3][int(generator.integers(4))]}

    [found] = preferences(placed(200, draw, lambda params: "gpu" if params["o"] == 3 else "cpu"), shown)
    assert str(found) == "o None, [1, 2], nan -> cpu 100 %, 3 -> gpu 100 %"


def test_a_label_of_some_trials_only_does_not_count() -> None:
    def draw(generator: np.random.Generator) -> Params:
        return {"a": 1.0, "b": 2.0} if generator.uniform() < 0.5 else {"a": 1.0}

    assert preferences(placed(200, draw, lambda params: "gpu" if "b" in params else "cpu"), shown) == []


@pytest.mark.parametrize("speed", [1.0, 3.0])
def test_where_the_param_changes_the_seconds_of_every_class_alike_nothing_is_said(speed: float) -> None:
    """What went where has gained nothing then, whatever the reason."""
    noise = np.random.default_rng(2)

    def alike(params: Params, compute_class: str) -> float:
        return (speed if compute_class == "cpu" else 1.0) * (1 + params["width"]) * noise.lognormal(0, 0.3)

    def draw(generator: np.random.Generator) -> Params:
        return {"width": float(generator.uniform())}

    def mostly(params: Params) -> str:
        return "gpu" if noise.uniform() < 0.2 + 0.6 * params["width"] else "cpu"

    assert preferences(placed(2000, draw, mostly, alike), shown) == []
    assert preferences(placed(2000, draw, mostly, lambda params, name: 1 + params["width"] * (name == "cpu")), shown)
