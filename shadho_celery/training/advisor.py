"""How wide a trial should train: seconds per step by width, iterations by width, and the N and b that follow from them.

Steps: Ernest's model, fitted to each compute class by non-negative least squares. Iterations: I(m) = I_inf (1 + c / m).
Both as in Hemingway (arXiv 1702.05865). `layers.prior_seconds` stands in where there are few profiles.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from shadho_celery.errors import UsageError
from shadho_celery.training.backups import Law, simulate
from shadho_celery.training.report import Report

Array = NDArray[np.float64]

#: a fit is believed up to this many times the widest profile
REACH = 2.0
#: what the prior weighs beside one profile
PRIOR_WEIGHT = 0.1
#: backups that are tried, at most
MOST_BACKUPS = 8


@dataclass(frozen=True, kw_only=True)
class Profile:
    """The seconds per step that were measured at one width."""

    #: replicas, m
    replicas: int
    #: seconds per step
    seconds: float
    #: examples of a step, of all replicas together
    size: float


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds per step of one compute class: f(m) = a + b (size / m) + c log m + d m."""

    #: a, b, c, d; none below 0
    coefficients: tuple[float, float, float, float]
    #: the most replicas of a profile
    widest: int

    def at(self, replicas: int, size: float) -> float:
        """Seconds per step at a width. Raises UsageError beyond twice the widest profile: four times was 42 % off."""
        _check_width(replicas, self.widest, "profile", "measure the step time")
        return float(_terms(replicas, size) @ np.array(self.coefficients))


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """Steps to the target by width: I(m) = I_inf (1 + c / m)."""

    #: I_inf
    limit: float
    #: c
    slope: float
    #: the most replicas of a training that was counted
    widest: int

    def at(self, replicas: int) -> float:
        """Steps that m gradients each make necessary. Raises UsageError beyond twice the widest training."""
        _check_width(replicas, self.widest, "training to the target", "train to the target")
        return self.limit * (1 + self.slope / replicas)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """A width, and what it should come to."""

    #: where to train
    compute_class: str
    #: N
    replicas: int
    #: b
    backups: int
    #: seconds from one step to the next
    step_seconds: float
    #: steps to the target
    iterations: float
    #: seconds to the target
    seconds: float
    #: those times N + b
    machine_seconds: float


def profile(report: Report, batch: int) -> Profile:
    """The mean seconds per step of a training with `batch` examples a gradient. Raises UsageError without steps."""
    if not report.steps:
        raise UsageError("a training without a step says nothing of its seconds: train for some steps first")
    return Profile(replicas=report.replicas, seconds=report.seconds / report.steps, size=float(batch * report.replicas))


def fit(profiles: Sequence[Profile], prior: tuple[float, float] | None = None) -> StepSeconds:
    """Fit f(m) to one class's profiles, each weighed by its own seconds: errors count in percent.

    `prior` is what b and d are thought to be (`layers.prior_seconds`); it stands in where profiles say little.
    """
    if not profiles:
        raise UsageError("no profile of this class: measure the seconds per step at two or more widths first")
    seconds = np.array([profile.seconds for profile in profiles])
    if not (seconds > 0).all() or min(profile.replicas for profile in profiles) < 1:
        raise UsageError("a profile needs one replica or more and more than 0 seconds per step: measure it again")
    terms = np.stack([_terms(profile.replicas, profile.size) for profile in profiles]) / seconds[:, None]
    targets = np.ones(len(profiles))
    if prior is not None:
        for column, value in zip((1, 3), prior, strict=True):
            row = np.zeros(4)
            row[column] = PRIOR_WEIGHT / max(value, 1e-12)
            terms, targets = np.vstack([terms, row]), np.append(targets, PRIOR_WEIGHT)
    # Columns of one size: seconds per example and seconds per replica lie far apart.
    scales = np.maximum(np.linalg.norm(terms, axis=0), 1e-12)
    a, b, c, d = (nnls(terms / scales, targets)[0] / scales).tolist()
    return StepSeconds(coefficients=(a, b, c, d), widest=max(profile.replicas for profile in profiles))


def fit_iterations(steps: Mapping[int, float]) -> Iterations:
    """Fit I(m) to the steps to a target by width. Raises UsageError for fewer than two widths, or one below 1."""
    if len(steps) < 2:
        raise UsageError("one width says nothing of how steps fall with it: train to the target at two widths or more")
    if min(steps) < 1 or not all(0 < count < math.inf for count in steps.values()):
        raise UsageError("steps to a target need one replica or more and more than 0 steps: train to the target again")
    widths, counts = np.array(list(steps), dtype=float), np.array(list(steps.values()), dtype=float)
    terms = np.stack([np.ones_like(widths), 1 / widths], axis=1) / counts[:, None]
    limit, times_slope = nnls(terms, np.ones_like(widths))[0]
    if limit <= 0:
        # Steps that fall at least as 1/m: within these widths there is no limit to be seen.
        limit = counts.min() * 1e-3
        times_slope = float(np.mean((counts - limit) * widths))
    return Iterations(limit=float(limit), slope=float(times_slope / limit), widest=max(steps))


def advise(
    steps: Mapping[str, StepSeconds],
    iterations: Iterations,
    *,
    batch: float,
    machines: Mapping[str, int] | None = None,
    least: Literal["seconds", "machine_seconds"] = "seconds",
    law: Law | None = None,
    cancel_seconds: float | None = None,
    seed: int = 0,
) -> Advice:
    """Return the class, N and b that reach the target in the least seconds, or machine-seconds.

    `batch` is the examples of one replica's gradient; `machines` the slots of each class, by default as many as the
    fits are believed for. With a `law` of response times backups are weighed too: b makes a step of N gradients shorter
    by what the renewal simulation says. Raises UsageError where `machines` go beyond twice the widest profile, or twice
    the widest training that `iterations` are of.
    """
    if machines is None:
        machines = {name: int(REACH * min(each.widest, iterations.widest)) for name, each in steps.items()}
    if not machines or min(machines.values()) < 1 or machines.keys() - steps.keys():
        raise UsageError("machines must name classes that have profiles, with one slot or more of each")

    def relative(replicas: int, most: int) -> list[float]:
        """Step times with 0..`most` backups over the one without."""
        if law is None:
            return [1.0]
        seconds = [
            simulate(
                law, replicas, b, cancel_seconds=cancel_seconds, generator=np.random.default_rng(seed)
            ).step_seconds
            for b in range(min(most, MOST_BACKUPS) + 1)
        ]
        return [each / seconds[0] for each in seconds]

    return min(
        (
            advice
            for name, slots in machines.items()
            for advice in _widths(name, steps[name], iterations, batch=batch, slots=slots, relative=relative)
        ),
        key=lambda advice: (getattr(advice, least), advice.replicas + advice.backups),
    )


def _widths(
    compute_class: str,
    steps: StepSeconds,
    iterations: Iterations,
    *,
    batch: float,
    slots: int,
    relative: Callable[[int, int], list[float]],
) -> Iterator[Advice]:
    # From the widest on: what cannot be said of it is refused at once.
    for replicas in range(slots, 0, -1):
        alone = steps.at(replicas, batch * replicas)
        for backups, factor in enumerate(relative(replicas, slots - replicas)):
            seconds = alone * factor * iterations.at(replicas)
            yield Advice(
                compute_class=compute_class,
                replicas=replicas,
                backups=backups,
                step_seconds=alone * factor,
                iterations=iterations.at(replicas),
                seconds=seconds,
                machine_seconds=seconds * (replicas + backups),
            )


def _check_width(replicas: int, widest: int, what: str, remedy: str) -> None:
    if replicas < 1:
        raise UsageError(f"{replicas} replicas train nothing: ask for one or more")
    if replicas > REACH * widest:
        raise UsageError(
            f"{replicas} replicas are more than {REACH:g} times the widest {what} ({widest}): "
            f"{remedy} with {math.ceil(replicas / REACH)} or more first"
        )


def _terms(replicas: int, size: float) -> Array:
    return np.array([1.0, size / replicas, math.log(replicas), float(replicas)])
