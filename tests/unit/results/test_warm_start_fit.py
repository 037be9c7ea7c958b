"""Trials from elsewhere teach as far as they fit a space; a line says what became of the others."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hyperopt import hp

from shadho_celery.core.trial import TrialState
from shadho_celery.errors import UsageError
from shadho_celery.results.warm_start import Lesson, Source, fit, refuse_if_resumed
from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

SUBSPACES = split(
    compile_space(
        {"rate": hp.uniform("rate", 0, 1), "kind": hp.choice("kind", ["plain", {"depth": hp.randint("depth", 9)}])}
    )
)


def source(*trials: tuple[Mapping[str, Any], Any], **left_out: int) -> Source:
    trials_ = [Lesson(point=point, loss=loss) for point, loss in trials]
    return Source(name="study svm", trials=trials_, left_out=left_out)


def test_what_fits_is_complete_and_has_no_seconds() -> None:
    found = fit(source(({"rate": 0.5, "kind": "plain"}, 2), ({"rate": 1, "kind": 1, "depth": 3.0}, 1.5)), SUBSPACES)
    first, second = found.trials
    assert (first.params, first.outcome.loss, first.state) == ({"rate": 0.5, "kind": 0}, 2.0, TrialState.COMPLETE)
    assert (second.params, second.subspace) == ({"rate": 1.0, "kind": 1, "depth": 3}, "kind={'depth': depth}")
    assert (first.outcome.seconds, first.compute_class) == (None, None)
    assert (found.words, found.is_whole) == ("warm start: learned from 2 of 2 trials of study svm", True)


def test_what_does_not_fit_is_counted_by_its_reason() -> None:
    known = {"rate": 0.5, "kind": 0}
    found = fit(
        source(
            (known, 1.0),
            ({**known, "rate": 2.0}, 1.0),
            ({**known, "rate": -1.0}, 1.0),
            ({**known, "depth": 1}, 1.0),
            ({"other": 1}, 1.0),
            (known, float("inf")),
            (known, 10**400),
            (known, "text"),
            (known, np.complex128(1)),
            failed=4,
        ),
        SUBSPACES,
    )
    assert len(found.trials) == 1
    assert found.words == (
        "warm start: learned from 1 of 13 trials of study svm; left out 4 failed, 4 without a finite loss, "
        "2 outside rate (uniform(0, 1)), 1 with labels that are not active together and 1 for other reasons"
    )


def test_trials_without_the_losses_of_the_study_are_left_out() -> None:
    point, losses = {"rate": 0.5, "kind": 0}, {"ms": 3.0, "acc": 0.9}
    known = [
        Lesson(point=point, loss=3.0, losses=losses, constraints={"size": 2}),
        Lesson(point=point, loss=1.0),
        Lesson(point=point, loss=1.0, losses={"ms": 1.0}),
        Lesson(point=point, loss=1.0, losses=losses, constraints={"size": "x"}),
    ]
    found = fit(Source(name="s", trials=known), SUBSPACES, {"acc": "maximize", "ms": "minimize"})
    [trial] = found.trials
    assert (trial.outcome.loss, trial.outcome.losses, trial.outcome.violation) == (-0.9, {"acc": -0.9, "ms": 3.0}, 2.0)
    assert found.words.endswith("left out 2 without the losses acc, ms, 1 without a finite constraint")
    assert fit(Source(name="s", trials=known), SUBSPACES).trials[0].outcome.loss == 3.0, "of several the first"


def test_labels_that_are_lacking_are_drawn_alike_each_time_and_others_dropped() -> None:
    known = source(({"rate": 0.5, "old": 1, 3: 4}, 1.0), ({"rate": 0.6}, 2.0))  # type: ignore[dict-item]
    found = fit(known, SUBSPACES)
    assert [trial.params for trial in found.trials] == [trial.params for trial in fit(known, SUBSPACES).trials]
    assert {"kind", "rate"} <= {*found.trials[0].params} <= {"kind", "rate", "depth"}
    assert "dropped because the space lacks them: 3, old; drawn because trials lack them: " in found.words
    assert not found.is_whole


def test_a_source_of_which_nothing_fits_is_refused() -> None:
    with pytest.raises(UsageError, match=r"none of 3 trials of study svm fits this study: left out 2 failed, 1"):
        fit(source(({"rate": 7}, 1.0), failed=2), SUBSPACES)


def test_a_study_that_is_continued_has_its_warm_start() -> None:
    refuse_if_resumed(None, resume=True)
    refuse_if_resumed("svm", resume=False)
    with pytest.raises(UsageError, match="leave out warm_start or resume"):
        refuse_if_resumed("svm", resume=True)


def test_trials_that_break_the_bounds_between_params_are_left_out_and_counted() -> None:
    """A trial that lacks a label gets a value with which it obeys them, if there is one."""
    bounded = replace(SUBSPACES[0].space, where=lambda values: values["kind"] == "plain" or values["rate"] < 0.5)
    trials = [({"rate": 0.2, "kind": 1, "depth": 3}, 1.0), ({"rate": 0.7, "kind": 1, "depth": 3}, 2.0)]
    found = fit(source(*trials, ({"rate": 0.7}, 3.0)), split(bounded))
    assert [(trial.params["rate"], trial.params["kind"]) for trial in found.trials] == [(0.2, 1), (0.7, 0)]
    assert "learned from 2 of 3 trials of study svm; left out 1 refused by where" in found.words
