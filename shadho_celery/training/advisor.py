"""Advice on the number of replicas: the N and b with the least time to a target, from a few measured widths.

A width is a number of replicas. Step time is Ernest's model, fitted to each compute class by non-negative least
squares. The number of iterations is I(m) = I_inf (1 + c / m). Both are as in Hemingway (arXiv 1702.05865). With few
profiles, `layers.prior_seconds` gives a prior for the step time.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
from scipy.optimize import nnls

from shadho_celery.errors import UsageError
from shadho_celery.training.backups import Array, Law, choose
from shadho_celery.training.report import Report

#: a fit is used up to this multiple of the widest profile
REACH = 2.0
#: weight of the prior, relative to one profile
PRIOR_WEIGHT = 0.1
#: maximum number of backups that are tried
MAX_BACKUPS = 8


@dataclass(frozen=True, kw_only=True)
class Profile:
    """Seconds per step measured with one number of replicas."""

    #: number of replicas, m
    replicas: int
    #: seconds per step
    seconds: float
    #: examples per step, over all replicas
    size: float


@dataclass(frozen=True, kw_only=True)
class StepSeconds:
    """Seconds per step of one compute class: f(m) = a + b (size / m) + c log m + d m."""

    #: a, b, c, d; none is negative
    coefficients: tuple[float, float, float, float]
    #: number of replicas of the widest profile
    widest: int

    def at(self, replicas: int, size: float) -> float:
        """Return the seconds per step with m replicas.

        Raises UsageError above twice the widest profile: at four times, predictions were 42 % off.
        """
        _check_width(replicas, self.widest, "profile", "measure the step time")
        return float(_terms(replicas, size) @ np.array(self.coefficients))


@dataclass(frozen=True, kw_only=True)
class Iterations:
    """Steps to the target for m replicas: I(m) = I_inf (1 + c / m)."""

    #: I_inf
    limit: float
    #: c
    slope: float
    #: number of replicas of the widest training
    widest: int

    def at(self, replicas: int) -> float:
        """Return the steps to the target with m replicas. Raises UsageError above twice the widest training."""
        _check_width(replicas, self.widest, "training to the target", "train to the target")
        return self.limit * (1 + self.slope / replicas)


@dataclass(frozen=True, kw_only=True)
class Advice:
    """Advised number of replicas with its predictions."""

    #: compute class for the training
    compute_class: str
    #: N
    replicas: int
    #: b
    backups: int
    #: seconds per step
    step_seconds: float
    #: steps to the target
    iterations: float
    #: seconds to the target
    seconds: float
    #: `seconds` times N + b
    machine_seconds: float


def profile(report: Report, batch: int) -> Profile:
    """Return the profile of a training with `batch` examples per gradient. Raises UsageError if it has no steps."""
    if not report.steps:
        raise UsageError("the training took no step, so it has no step time; train for a few steps first")
    return Profile(replicas=report.replicas, seconds=report.seconds / report.steps, size=float(batch * report.replicas))


def fit(profiles: Sequence[Profile], prior: tuple[float, float] | None = None) -> StepSeconds:
    """Fit f(m) to the profiles of one compute class by relative least squares.

    `prior` gives b and d (`layers.prior_seconds`). It determines what the profiles leave undetermined.
    """
    if not profiles:
        raise UsageError("this compute class has no profile; measure the seconds per step at two or more widths first")
    seconds = np.array([profile.seconds for profile in profiles])
    if not (seconds > 0).all() or min(profile.replicas for profile in profiles) < 1:
        raise UsageError("a profile needs at least one replica and more than 0 seconds per step; measure it again")
    terms = np.stack([_terms(profile.replicas, profile.size) for profile in profiles]) / seconds[:, None]
    targets = np.ones(len(profiles))
    if prior is not None:
        for column, value in zip((1, 3), prior, strict=True):
            row = np.zeros(4)
            row[column] = PRIOR_WEIGHT / max(value, 1e-12)
            terms, targets = np.vstack([terms, row]), np.append(targets, PRIOR_WEIGHT)
    # Columns are scaled to the same norm: seconds per example and per replica differ by orders of magnitude.
    scales = np.maximum(np.linalg.norm(terms, axis=0), 1e-12)
    a, b, c, d = (nnls(terms / scales, targets)[0] / scales).tolist()
    return StepSeconds(coefficients=(a, b, c, d), widest=max(profile.replicas for profile in profiles))


def fit_iterations(steps: Mapping[int, float]) -> Iterations:
    """Fit I(m) to the steps to a target, by number of replicas. Raises UsageError for fewer than two, or one below
    1.
    """
    if len(steps) < 2:
        raise UsageError(
            "one width does not show how the number of steps depends on it; train to the target at two widths or more"
        )
    if min(steps) < 1 or not all(0 < count < math.inf for count in steps.values()):
        raise UsageError(
            "the steps to a target need at least one replica and more than 0 steps; train to the target again"
        )
    widths, counts = np.array(list(steps), dtype=float), np.array(list(steps.values()), dtype=float)
    terms = np.stack([np.ones_like(widths), 1 / widths], axis=1) / counts[:, None]
    limit, times_slope = nnls(terms, np.ones_like(widths))[0]
    if limit <= 0:
        # The steps fall at least as fast as 1/m: these widths show no limit.
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
    """Return the compute class, N and b that reach the target in the least seconds, or in the least machine-seconds.

    `batch` is the number of examples per gradient. `machines` gives the slots of each class, by default as many as the
    fits can be used for. With a `law` of response times, backups are considered too: the renewal simulation predicts by
    how much b shortens a step of N gradients. Raises UsageError if `machines` exceed twice the widest profile, or twice
    the widest training of `iterations`.
    """
    if machines is None:
        machines = {name: int(REACH * min(each.widest, iterations.widest)) for name, each in steps.items()}
    if not machines or min(machines.values()) < 1 or machines.keys() - steps.keys():
        raise UsageError("machines must name compute classes with profiles, each with one slot or more")

    def relative(replicas: int, spare: int) -> list[float]:
        """Return the step times with 0 to `spare` backups, relative to that without backups."""
        if law is None:
            return [1.0]
        most = min(spare, MAX_BACKUPS)
        tried = choose(law, replicas=replicas, max_backups=most, cancel_seconds=cancel_seconds, seed=seed).predictions
        return [each.step_seconds / tried[0].step_seconds for each in tried]

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
    """Yield the advice for each number of replicas and backups of one compute class."""
    # The largest first: if it exceeds the fits, it is refused before any work is done.
    for replicas in range(slots, 0, -1):
        without_backups = steps.at(replicas, batch * replicas)
        for backups, factor in enumerate(relative(replicas, slots - replicas)):
            seconds = without_backups * factor * iterations.at(replicas)
            yield Advice(
                compute_class=compute_class,
                replicas=replicas,
                backups=backups,
                step_seconds=without_backups * factor,
                iterations=iterations.at(replicas),
                seconds=seconds,
                machine_seconds=seconds * (replicas + backups),
            )


def _check_width(replicas: int, widest: int, measured: str, remedy: str) -> None:
    if replicas < 1:
        raise UsageError(f"replicas is {replicas}; give one or more")
    if replicas > REACH * widest:
        raise UsageError(
            f"{replicas} replicas are more than {REACH:g} times the widest {measured} ({widest}); "
            f"{remedy} with {math.ceil(replicas / REACH)} or more first"
        )


def _terms(replicas: int, size: float) -> Array:
    return np.array([1.0, size / replicas, math.log(replicas), float(replicas)])
