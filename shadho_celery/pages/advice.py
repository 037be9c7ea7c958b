"""What to try next, as sentences: each rule looks at the columns of a study and says nothing if it does not apply."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from shadho_celery.charts.explained import scaled
from shadho_celery.charts.failures import failures, failures_by_label
from shadho_celery.charts.machines import are_telling, one_more_worker
from shadho_celery.core.trial import COUNTED
from shadho_celery.core.units import digits
from shadho_celery.pages.reading import StudyData

#: number of rated trials from which on their best values say something about a label's range
LEAST_TRIALS = 20
#: number of best trials that must all lie near one end, and the part of the range that is near an end
BEST, END = 3, 0.05
#: share of failed trials from which on failures are mentioned
MANY_FAILED = 0.1
#: share of the latest trials: a best trial among them means that the search still makes progress
LATEST = 0.2
#: beginnings of the descriptions of domains without ends
_ENDLESS = ("normal(", "lognormal(", "qnormal(", "qlognormal(")


def advice(data: StudyData) -> list[str]:
    """Return sentences about what to try next, the most urgent first."""
    return [sentence for rule in RULES for sentence in rule(data)]


def many_failures(data: StudyData) -> Iterator[str]:
    """If many trials fail, say with what and where in the space. Trials under earlier code do not count."""
    trials = data.trials()
    failed = int(((trials.failure.codes >= 0) & trials.is_current).sum())
    ended = int((trials.state.is_in(*COUNTED) & trials.is_current).sum())
    if failed and failed >= MANY_FAILED * ended:
        where = failures_by_label(trials)
        yield f"{failures(trials).title}."
        if where.empty:
            yield "Fix the cause of the failures."
        else:
            yield f"{where.title}: fix the cause, or exclude such params from the space."


def best_at_an_end(data: StudyData) -> Iterator[str]:
    """If the best trials have values at one end of a label's range, say that the range may be too small.

    It is only a possibility: an adaptive sampler draws the best trials alike, also in labels without an effect.
    """
    trials, space = data.trials(), data.study.space
    rated = np.flatnonzero(trials.is_rated)
    if len(rated) < LEAST_TRIALS:
        return
    order = rated[np.argsort(trials.merit[rated], kind="stable")]
    for label in trials.labels.values():
        best = order[label.is_active[order]][:BEST]
        if label.options or len(best) < BEST or best[0] != order[0] or space.get(label.name, "").startswith(_ENDLESS):
            continue
        # A label with few values, such as the number of layers, has its ends drawn often: that says nothing.
        if len(np.unique(label.values[label.is_active])) <= LEAST_TRIALS / 2:
            continue
        places = scaled(label, label.values)[best]
        for is_near, end in ((places <= END, "lower"), (places >= 1 - END, "upper")):
            if is_near.all():
                value = digits(float(label.values[order[0]]))
                yield (
                    f"The best trials have {label.name} at the {end} end of its range ({value}): "
                    "a wider range may have better ones."
                )


def progress(data: StudyData) -> Iterator[str]:
    """Say if the best trial is one of the latest, so that more trials may find a better one, or if nothing gets on."""
    trials = data.trials()
    rated = np.flatnonzero(trials.is_rated)
    if len(rated) < LEAST_TRIALS:
        return
    best = int(rated[np.argmin(trials.merit[rated])])
    if best >= (1 - LATEST) * len(trials):
        how = f" (shadho-celery resume {data.study.name} --trials {2 * len(trials)})"
        yield (
            f"The best trial, {trials.number[best]}, is one of the latest: more trials may find a better one"
            f"{'' if data.study.is_simulated else how}."
        )
    elif still := data.report.still_words:
        yield f"{still[:1].upper()}{still[1:]}."


def another_worker(data: StudyData) -> Iterator[str]:
    """Say of which class one more worker adds most, if there are several classes on several machines.

    Nothing is said of a short study: its start-up and the time to send trials decide, and not the number of workers.
    """
    trials, attempts = data.trials(), data.attempts()
    is_fleet = len(trials.compute_class.names) > 1 and len(trials.host.names) > 1
    if is_fleet and are_telling(trials, attempts) and not (chart := one_more_worker(trials, attempts)).empty:
        yield f"{chart.title}."


#: rules in the order of their sentences
RULES: tuple[Callable[[StudyData], Iterator[str]], ...] = (
    many_failures,
    best_at_an_end,
    progress,
    another_worker,
)
