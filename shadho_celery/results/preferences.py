"""For each subspace, the param that best explains on which compute classes its trials were placed."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from itertools import groupby
from typing import Any

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

from shadho_celery.core.checks import listed
from shadho_celery.core.trial import Trial, TrialState

#: minimum number of trials of a subspace before its params are examined
LEAST_TRIALS = 60
#: minimum association (Cramer's V) of param and class for a preference: from 0 for independence to 1 for a fixed rule
LEAST_ASSOCIATION = 0.2
#: maximum p-value of such an association
SIGNIFICANCE = 1e-3
#: number of parts into which the values of a numeric param are divided; with no more values than that, one per value
PARTS = 6
#: association above which the classes have too few similar trials, so that their seconds cannot be compared
SEPARATED = 0.7
#: minimum standard deviation, in log seconds, of the difference between the param's effects on different classes
LEAST_GAIN = 0.05
#: maximum number of options that a line names
OPTIONS = 4


class Part(Struct, frozen=True, kw_only=True):
    """Trials with similar values of the param."""

    #: text of the param's values, such as ``24 to 64``
    values: str
    trials: int
    #: compute class that got the most of these trials compared with its share of all trials; and its share of these
    compute_class: str
    share: float


class Preference(Struct, frozen=True, kw_only=True):
    """Param of a subspace by which its trials were placed on compute classes, in parts of its values."""

    subspace: str
    label: str
    parts: Sequence[Part]

    def __str__(self) -> str:
        parts = (f"{part.values} -> {part.compute_class} {100 * part.share:.0f} %" for part in self.parts)
        return f"{self.label} {', '.join(parts)}"


def preferences(trials: Iterable[Trial], shown: Callable[[Trial, str], Any]) -> list[Preference]:
    """Return the preferences of the subspaces whose COMPLETE trials were placed by a param, the strongest first.

    `shown` returns the value of one active label as the objective got it, from trial and label.
    """
    by_subspace: dict[str, list[Trial]] = defaultdict(list)
    for trial in trials:
        if trial.state is TrialState.COMPLETE and trial.compute_class is not None:
            by_subspace[trial.subspace].append(trial)
    found = [best for name, told in by_subspace.items() if (best := _strongest(name, told, shown)) is not None]
    return [preference for _, preference in sorted(found, key=lambda pair: -pair[0])]


def _strongest(
    subspace: str, trials: Sequence[Trial], shown: Callable[[Trial, str], Any]
) -> tuple[float, Preference] | None:
    """Return the strength and the preference of the param with the strongest association to the class.

    Return None if no param has a significant association.
    """
    classes, places = np.unique([str(trial.compute_class) for trial in trials], return_inverse=True)
    if len(trials) < LEAST_TRIALS or len(classes) < 2:
        return None
    # A label that only some trials have depends on a choice. Then the label of the choice is examined instead.
    labels = [label for label in trials[0].params if all(label in trial.params for trial in trials)]
    strongest: tuple[float, Preference] | None = None
    logs = np.log([max(trial.outcome.seconds or 0.0, 1e-9) for trial in trials])
    for label in labels:
        values = [shown(trial, label) for trial in trials]
        groups, words = _groups(values)
        table = np.zeros((len(words), len(classes)))
        np.add.at(table, (groups, places), 1)
        strength = _association(table)
        is_strongest = strength >= LEAST_ASSOCIATION and (strongest is None or strength > strongest[0])
        if is_strongest and (strength >= SEPARATED or _gains(values, places, logs)):
            parts = _parts(table, words, [str(name) for name in classes])
            strongest = strength, Preference(subspace=subspace, label=label, parts=parts)
    return strongest


def _groups(values: Sequence[Any], parts: int = PARTS) -> tuple[NDArray[np.intp], list[tuple[Any, ...]]]:
    """Return the group of each value, and for each group its least and greatest number, or its option as text."""
    if not all(type(value) in (int, float) and math.isfinite(value) for value in values):
        options, groups = np.unique([str(value) for value in values], return_inverse=True)
        return groups, [(str(option),) for option in options]
    numbers = np.array(values, float)
    distinct, groups = np.unique(numbers, return_inverse=True)
    if len(distinct) > parts:
        edges = np.quantile(numbers, np.arange(1, parts) / parts)
        groups = np.unique(np.searchsorted(edges, numbers), return_inverse=True)[1]
    members = [numbers[groups == group] for group in range(groups.max() + 1)]
    return groups, [(float(each.min()), float(each.max())) for each in members]


def _association(table: NDArray[np.float64]) -> float:
    """Return Cramer's V of a contingency table, or 0 if it is not significant."""
    if min(table.shape) < 2:
        return 0.0
    # Imported late, because the import takes a third of a second.
    from scipy.stats import chi2_contingency

    result = chi2_contingency(table)
    if result.pvalue > SIGNIFICANCE:
        return 0.0
    return math.sqrt(float(result.statistic) / (table.sum() * (min(table.shape) - 1)))


def _gains(values: Sequence[Any], places: NDArray[np.intp], logs: NDArray[np.float64]) -> bool:
    """Return whether the effect of the param on log seconds differs significantly between classes.

    If it does not, placing trials by this param saves no time. This is the F test of the interaction of param and class
    in an analysis of covariance. The effect of a number is a parabola of its rank, that of an option is a constant.
    """
    from scipy.stats import f

    effect = _effect(values)
    classes = np.equal.outer(places, np.arange(places.max() + 1)).astype(float)
    alike = np.concatenate([classes, effect], axis=1)
    unlike = np.concatenate([classes, *(effect * classes[:, [place]] for place in range(classes.shape[1]))], axis=1)
    fits = [design @ np.linalg.lstsq(design, logs, rcond=None)[0] for design in (alike, unlike)]
    ranks = [int(np.linalg.matrix_rank(design)) for design in (alike, unlike)]
    free, rest = ranks[1] - ranks[0], len(logs) - ranks[1]
    if free < 1 or rest < 1:
        # The trials of each option went to only one class, so classes cannot be compared.
        return True
    if float(np.std(fits[1] - fits[0])) < LEAST_GAIN:
        return False
    left = [float(np.square(logs - fit).sum()) for fit in fits]
    return left[1] <= 0 or float(f.sf((left[0] - left[1]) / free / (left[1] / rest), free, rest)) < SIGNIFICANCE


def _effect(values: Sequence[Any]) -> NDArray[np.float64]:
    """Return the regressors of log seconds: a number's rank and the square of it, or one indicator per option."""
    groups, words = _groups(values, len(values))
    if len(words[0]) > 1:
        ranks = groups / max(1, groups.max()) - 0.5
        return np.stack([ranks, ranks**2], axis=1)
    return np.equal.outer(groups, np.arange(len(words))).astype(float)


def _parts(table: NDArray[np.float64], words: Sequence[tuple[Any, ...]], classes: Sequence[str]) -> list[Part]:
    """Return the parts of a preference: groups that prefer the same class are joined; of numbers, only neighbours.

    A group prefers the class whose share of the group's trials exceeds its share of all trials by the greatest factor.
    """
    overall = table.sum(axis=0) / table.sum()
    preferred = np.argmax(table / table.sum(axis=1, keepdims=True) / overall, axis=1).tolist()
    order = range(len(words)) if len(words[0]) > 1 else sorted(range(len(words)), key=preferred.__getitem__)
    parts = []
    for place, members in groupby(order, preferred.__getitem__):
        groups = [*members]
        counts = table[groups].sum(axis=0)
        parts.append(
            Part(
                values=_in_words([words[group] for group in groups]),
                trials=int(counts.sum()),
                compute_class=classes[place],
                share=float(counts[place] / counts.sum()),
            )
        )
    return parts


def _in_words(found: Sequence[tuple[Any, ...]]) -> str:
    if len(found[0]) == 1:
        return listed([option for (option,) in found], OPTIONS)
    least, most = (
        str(int(number)) if number.is_integer() and abs(number) < 1e9 else f"{number:.3g}"
        for number in (found[0][0], found[-1][-1])
    )
    return least if least == most else f"{least} to {most}"
