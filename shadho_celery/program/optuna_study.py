"""Copy of a study as an Optuna study, for Optuna's plots and importances."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from datetime import datetime, timezone
from decimal import Decimal
from typing import TYPE_CHECKING, Any

from shadho_celery.core.settings import refuse_unknown
from shadho_celery.core.trial import Report, TrialState
from shadho_celery.core.units import counted
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.program.interrupts import warn
from shadho_celery.program.recorded import load_study
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.domains import Categorical, RandInt, make_domain
from shadho_celery.space.stored import Label, read_labels

if TYPE_CHECKING:
    import optuna

#: maximum number of trials; with more, Optuna's plots take minutes
MOST = 10_000
#: with this many steps or more, floats cannot represent all values of a grid
MOST_STEPS = 2**53
#: state of a trial -> name of Optuna's state
STATES: dict[str, str] = {TrialState.FAILED: "FAIL", TrialState.CANCELLED: "FAIL"}
STATES |= {each: each.name for each in (TrialState.COMPLETE, TrialState.PRUNED, TrialState.RUNNING)}
#: user attribute of a trial in Optuna -> attribute of our trial
_ATTRIBUTES = {"trial": "number", "class": "compute_class", "seconds": "seconds", "budget": "budget"}


@refuse_unknown
def optuna_study(store: str, name: str) -> optuna.Study:
    """Return a copy of a study as Optuna's `Study` in memory, with its distributions, reports, constraints and times.

    `store` and `name` are as for `load_study`. The copy is for ``optuna.visualization`` and ``optuna.importance``;
    changes to it do not affect the store. Params are the drawn values; for a choice, the text of the option. The user
    attribute `budget` of a trial is its budget. If the study has budgets, only trials with the highest budget are
    copied, and at most the latest 10,000 trials; a warning says how many are left out. Raises UsageError if Optuna is
    not installed.
    """
    try:
        import optuna
    except ModuleNotFoundError:
        raise UsageError('this needs Optuna; in the checkout: pip install -e ".[optuna]"') from None
    study = load_study(store, name)
    trials = _at_the_top(study.trials)
    if len(trials) > MOST:
        warn(f"Optuna gets the latest {MOST:,} of {len(trials):,} trials")
        trials = trials[-MOST:]
    losses = [*study.objectives] or ["loss"]
    ways: list[Any] = [*study.objectives.values()] or ["minimize"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
        made = optuna.create_study(study_name=study.name, directions=ways)
        if study.objectives:
            made.set_metric_names(losses)
    laws = _distributions(study.tree, trials, optuna.distributions)
    options = {label: law.choices for label, law in laws.items() if hasattr(law, "choices")}
    steps = steps_of(study.reports(), ways[0])
    for trial in trials:
        if (state := STATES.get(trial.state)) is None:
            continue
        values: list[Any] = [trial.losses.get(loss) for loss in losses] if study.objectives else [trial.loss]
        is_complete = state == "COMPLETE" and all(value is not None and math.isfinite(value) for value in values)
        copy = optuna.trial.create_trial(
            state=optuna.trial.TrialState["FAIL" if state == "COMPLETE" and not is_complete else state],
            params={label: options[label][int(v)] if label in options else v for label, v in trial.params.items()},
            distributions={label: laws[label] for label in trial.params},
            values=values if is_complete else None,
            intermediate_values=steps[trial.number],
            user_attrs={name: getattr(trial, fact) for name, fact in _ATTRIBUTES.items()},
            # Every version of Optuna accepts constraints as a list of numbers; an empty list means no constraints.
            system_attrs={"constraints": [number for _, number in sorted(trial.constraints.items())]},
        )
        # A trial that was cancelled may not have started.
        start = trial.started_at or trial.finished_at or study.created_at
        copy.datetime_start = moment(start)
        if copy.state.is_finished():
            copy.datetime_complete = moment(trial.finished_at or start)
        made.add_trial(copy)
    return made


def moment(seconds: float | None) -> datetime | None:
    """Return a time as Optuna represents it: in local time, without a time zone."""
    return None if seconds is None else datetime.fromtimestamp(seconds, timezone.utc).astimezone().replace(tzinfo=None)


def _at_the_top(trials: Iterable[TrialResult]) -> list[TrialResult]:
    """Return the trials with the highest budget that a complete trial has. Warn about the others.

    The budget None means the full fidelity, which is the highest.
    """
    found: defaultdict[float, list[TrialResult]] = defaultdict(list)
    for trial in trials:
        found[math.inf if trial.budget is None else trial.budget].append(trial)
    complete = [budget for budget, group in found.items() if any(each.state == TrialState.COMPLETE for each in group)]
    top = max(complete or found, default=math.inf)
    if others := sum(len(group) for budget, group in found.items() if budget != top):
        warn(
            f"Optuna gets the {counted(len(found[top]), 'trial')} with the highest budget, {top:g}; {others:,} with "
            "other budgets are left out, because their losses cannot be compared"
        )
    return found[top]


def steps_of(reports: Sequence[Report], way: str) -> Mapping[int, dict[int, float]]:
    """Return by trial the reported losses of its last attempt, by step, in the objective's own direction.

    `reports` are sorted by attempt.
    """
    sign = -1.0 if way == "maximize" else 1.0
    last = {report.number: report.attempt for report in reports}
    found: defaultdict[int, dict[int, float]] = defaultdict(dict)
    for report in reports:
        if report.attempt == last[report.number] and report.step >= 0:
            found[report.number][report.step] = sign * report.loss
    return found


def _distributions(tree: Mapping[str, Any] | None, trials: Sequence[TrialResult], kinds: Any) -> dict[str, Any]:
    """Return an Optuna distribution for each label, which includes all drawn values of the label.

    For a label whose recorded domain cannot be read, the distribution is the range of its drawn values.
    """
    drawn: defaultdict[str, list[float]] = defaultdict(list)
    for trial in trials:
        for label, value in trial.params.items():
            drawn[label].append(value)
    labels = read_labels(tree)
    found = {}
    for label, values in drawn.items():
        try:
            found[label] = _distribution(label, labels[label], values, kinds)
        except (ShadhoError, ArithmeticError, LookupError, TypeError, ValueError):
            found[label] = kinds.FloatDistribution(min(values), max(values))
    return found


def _distribution(label: str, known: Label, values: Sequence[float], kinds: Any) -> Any:
    """Return the Optuna distribution of a label, extended to include recorded values outside its domain.

    A grid that floats cannot represent exactly becomes a range. Raises LookupError for an option that does not exist.
    """
    if known.law == Categorical.law:
        texts = [str(option) for option in known.options or range(len(known.parameters["probabilities"]))]
        if min(values) < 0 or max(values) >= len(texts):
            raise LookupError
        if len({*texts}) < len(texts):
            texts = [f"{place}: {text}" for place, text in enumerate(texts)]
        return kinds.CategoricalDistribution(texts)
    domain = make_domain(label, known.law, known.parameters)
    assert not isinstance(domain, Categorical)
    ends = domain.from_unit([0.0, 1.0]).tolist()
    low, high = min(*ends, *values), max(*ends, *values)
    if isinstance(domain, RandInt):
        is_whole = max(-low, high) < MOST_STEPS and all(float(value).is_integer() for value in values)
        return kinds.IntDistribution(int(low), int(high)) if is_whole else kinds.FloatDistribution(low, high)
    if domain.step is not None and _is_held(low, high, domain.step, values):
        return kinds.FloatDistribution(low, high, step=domain.step)
    return kinds.FloatDistribution(low, high, log=domain.log and domain.step is None and low > 0)


def _is_held(low: float, high: float, step: float, values: Sequence[float]) -> bool:
    """Return whether Optuna accepts the grid: `high` is a grid point in decimal arithmetic, and each value is within
    1e-9 steps of a grid point.
    """
    if (high - low) / step >= MOST_STEPS or (Decimal(str(high)) - Decimal(str(low))) % Decimal(str(step)):
        return False
    return all(abs(place - round(place)) < 1e-9 for place in ((value - low) / step for value in values))
