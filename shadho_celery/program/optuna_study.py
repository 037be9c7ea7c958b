"""A study as Optuna has it, for Optuna's plots and importances."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from shadho_celery.core.trial import Report, TrialState
from shadho_celery.errors import ShadhoError, Surface, UsageError, told
from shadho_celery.program.recorded import load_study
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.domains import (
    Categorical,
    Domain,
    LogUniform,
    Normal,
    QLogUniform,
    QUniform,
    RandInt,
    make_domain,
)
from shadho_celery.space.stored import Label, read_labels

if TYPE_CHECKING:
    import optuna

#: maximum number of trials: Optuna's plots take minutes for more
MOST = 10_000
#: names of Optuna's states
_STATES = {
    TrialState.COMPLETE: "COMPLETE",
    TrialState.PRUNED: "PRUNED",
    TrialState.FAILED: "FAIL",
    TrialState.CANCELLED: "FAIL",
    TrialState.RUNNING: "RUNNING",
}


@told(Surface.PYTHON)
def optuna_study(store: str, name: str) -> optuna.Study:
    """Return a copy of a study in memory as Optuna's `Study`, with its distributions, reports and states.

    `store` and `name` are as for `load_study`. The copy is for ``optuna.visualization`` and ``optuna.importance``: what
    is done to it does not reach the store. Of more than 10,000 trials, the latest are copied, with a warning. Numbers
    have the drawn values, and choices the texts of their options. Raises UsageError without Optuna.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError('this needs Optuna; in the checkout: pip install -e ".[optuna]"') from None
    study = load_study(store, name)
    trials = study.trials[-MOST:]
    if len(study.trials) > MOST:
        warnings.warn(f"Optuna gets the latest {MOST:,} of {len(study.trials):,} trials", stacklevel=3)
    losses = [*study.objectives] or ["loss"]
    ways: list[Any] = [*study.objectives.values()] or ["minimize"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        made = optuna.create_study(study_name=study.name, directions=ways)
        if study.objectives:
            made.set_metric_names(losses)
    laws = _distributions(study.tree, trials, optuna)
    reports: defaultdict[int, list[Report]] = defaultdict(list)
    for report in study.reports():
        reports[report.number].append(report)
    for trial in trials:
        if (state := _STATES.get(TrialState(trial.state))) is None:
            continue
        values: list[Any] = [trial.losses.get(loss) for loss in losses] if study.objectives else [trial.loss]
        params = {label: _shown(laws[label], value) for label, value in trial.params.items() if label in laws}
        is_complete = state == "COMPLETE" and all(value is not None and math.isfinite(value) for value in values)
        made.add_trial(
            optuna.trial.create_trial(
                state=optuna.trial.TrialState["FAIL" if state == "COMPLETE" and not is_complete else state],
                params=params,
                distributions={label: laws[label] for label in params},
                values=values if is_complete else None,
                intermediate_values=_steps(reports[trial.number], ways[0]),
                user_attrs={"trial": trial.number, "class": trial.compute_class, "seconds": trial.seconds},
            )
        )
    return made


def _steps(reports: Sequence[Report], way: str) -> dict[int, float]:
    """Return the losses of the last attempt by step, in the objective's own direction."""
    last = max((report.attempt for report in reports), default=0)
    sign = -1.0 if way == "maximize" else 1.0
    return {report.step: sign * report.loss for report in reports if report.attempt == last and report.step >= 0}


def _shown(law: Any, value: float) -> Any:
    """Return the value of a label as its distribution has it: the text of an option, or a number."""
    choices = getattr(law, "choices", None)
    return value if choices is None else choices[int(value)]


def _distributions(tree: Mapping[str, Any] | None, trials: Sequence[TrialResult], optuna: Any) -> dict[str, Any]:
    """Return Optuna's distribution of each label. Without a space in the store, it is the range of the values."""
    drawn: defaultdict[str, list[float]] = defaultdict(list)
    for trial in trials:
        for label, value in trial.params.items():
            drawn[label].append(value)
    labels = read_labels(tree)
    found = {}
    for label, values in drawn.items():
        known = labels.get(label)
        try:
            domain = None if known is None else _domain(label, known)
        except (ShadhoError, KeyError, TypeError, ValueError):
            domain = None
        if known is None or domain is None:
            found[label] = optuna.distributions.FloatDistribution(min(values), max(values))
        else:
            found[label] = _distribution(domain, known.options, values, optuna.distributions)
    return found


def _domain(label: str, known: Label) -> Domain:
    if known.law == Categorical.law:
        return make_domain(label, known.law, {"p": known.parameters["probabilities"]})
    return make_domain(label, known.law, known.parameters)


def _distribution(domain: Domain, options: Sequence[Any] | None, values: Sequence[float], kinds: Any) -> Any:
    if isinstance(domain, Categorical):
        texts = [str(option) for option in options or range(domain.count)]
        # Two options may have one text.
        names = [text if texts.count(text) == 1 else f"{place}: {text}" for place, text in enumerate(texts)]
        return kinds.CategoricalDistribution(names)
    least, most = min(values), max(values)
    if isinstance(domain, RandInt):
        return kinds.IntDistribution(min(domain.low, int(least)), max(domain.high - 1, int(most)))
    if isinstance(domain, QUniform) and (steps := domain.steps()) is not None and len(steps[0]) > 1:
        grid, step = steps
        return kinds.FloatDistribution(grid[0] * step, grid[-1] * step, step=step)
    if isinstance(domain, LogUniform) and not isinstance(domain, QLogUniform):
        return kinds.FloatDistribution(min(math.exp(domain.low), least), max(math.exp(domain.high), most), log=True)
    if isinstance(domain, Normal):
        # Optuna has no distribution without ends.
        return kinds.FloatDistribution(least, most)
    low, high = (math.exp(end) if isinstance(domain, QLogUniform) else end for end in (domain.low, domain.high))
    return kinds.FloatDistribution(min(low, least), max(high, most))
