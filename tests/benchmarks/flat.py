"""Flat spaces for the placement benchmark: one family whose seconds depend on params, the same cut by hand, the bound.

Cut by hand means a family for each part of the params that the seconds depend on: each option of a choice, quarters of
one number, halves of two. What comes of a flat space is compared with that, with `fifo`, and with the linear program
over kinds of trials whose seconds are known.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple
from unittest.mock import patch

import fleets
import numpy as np
from figures import beside, goal, show
from hyperopt import hp
from playing import play_study
from scipy.stats import qmc
from services.families import Family, cluster_of, fleet_of, half_normal, log_normal

from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.placement.model import CostModel
from shadho_celery.simulation.simulation import Cluster, Simulation, simulate
from shadho_celery.space.compile import compile_space
from shadho_celery.space.features import Array

#: samplers that learn from losses; their proposals take milliseconds: they are played for an hour at most
ADAPTIVE, ADAPTIVE_HOURS = ("tpe", "auto"), 1.0
#: trials for each slot in a block of theirs, for which there is one bound
BLOCK = 10
#: 150 workers, and the fleet of the issue that asked for this
FLEET, SMALL = {"gpu": 40, "cpu": 110}, {"gpu": 4, "cpu": 12}
THREE = {"large": 25, "small": 50, "cpu": 75}

#: seconds of forty options on two classes, of which neither is the faster one at all
OPTIONS = {
    f"m{place:02d}": seconds
    for place, seconds in enumerate(
        np.exp(np.random.default_rng(40).normal((3.0, 4.0), 0.8, (40, 2))).round(1).tolist()
    )
}


class Number(NamedTuple):
    """A param with a uniform distribution, or a log-uniform one."""

    low: float
    high: float
    is_log: bool = False

    def node(self, label: str) -> Any:
        if self.is_log:
            return hp.loguniform(label, math.log(self.low), math.log(self.high))
        return hp.uniform(label, self.low, self.high)

    def quantile(self, mass: float) -> float:
        ratio = self.high / self.low if self.is_log else 1.0
        return self.low * ratio**mass if self.is_log else self.low + mass * (self.high - self.low)

    def pieces(self, number: int) -> list[Number]:
        """Equal parts of the range."""
        logs = np.linspace(math.log(self.low), math.log(self.high), number + 1) if self.is_log else None
        ends = np.linspace(self.low, self.high, number + 1).tolist() if logs is None else np.exp(logs).tolist()
        return [Number(low, high, self.is_log) for low, high in itertools.pairwise(ends)]


class Choice(NamedTuple):
    """A param that is one of some options."""

    options: tuple[str, ...]

    def node(self, label: str) -> Any:
        return hp.choice(label, list(self.options))

    def quantile(self, mass: float) -> str:
        return self.options[min(int(mass * len(self.options)), len(self.options) - 1)]

    def pieces(self, _: int) -> list[Choice]:
        """Each option on its own."""
        return [Choice((option,)) for option in self.options]


W = Number(0.0, 1.0)
#: by class: seconds from the params
Seconds = Mapping[str, Callable[[Mapping[str, Any]], float]]
ONE: Seconds = {"gpu": lambda p: 20 + 10 * p["w"], "cpu": lambda p: 20 + 400 * p["w"]}
TABLE: Seconds = {"gpu": lambda p: OPTIONS[p["m"]][0], "cpu": lambda p: OPTIONS[p["m"]][1]}


@dataclass(frozen=True, kw_only=True)
class Case:
    """A flat space on a fleet."""

    fleet: Mapping[str, int]
    seconds: Seconds
    params: Mapping[str, Number | Choice]
    hours: float
    #: steps after which a trial reports; 0 for none
    steps: int = 0
    #: False where the seconds depend on no param
    is_cut: bool = True

    def cluster(self, parts: Sequence[Mapping[str, Number | Choice]] = ({},)) -> Cluster:
        """The cluster with one family, or with one for each of these parts of its params."""
        families = {
            f"flat {place}" if len(parts) > 1 else "flat": Family(
                seconds=lambda params, machine: self.seconds[machine.compute_class](params),
                params={name: each.node for name, each in {**self.params, **part}.items()},
                share=1.0 / len(parts),
            )
            for place, part in enumerate(parts)
        }
        factors = {"size": partial(log_normal, 0.3), "straggler": partial(half_normal, 0.5)}
        return cluster_of(fleet_of(self.fleet, steps=self.steps), families, {"seconds": self.hours * 3600}, **factors)

    def cut(self) -> Cluster:
        """The cluster cut by hand into a family for each part of the params that its seconds depend on."""
        numbers = [name for name, each in self.params.items() if isinstance(each, Number)]
        each = {1: 4, 2: 2}.get(len(numbers), 1)
        pieces = [[{name: piece} for piece in known.pieces(each)] for name, known in self.params.items()]
        parts = [{k: v for piece in pieces for k, v in piece.items()} for pieces in itertools.product(*pieces)]
        return self.cluster(parts if self.is_cut else ({},))

    def best(self, drawn: Sequence[Mapping[str, Any]] = ()) -> float:
        """The most trials that any placement could complete, with these values of the params, or with all of them."""
        if not drawn:
            points = qmc.Sobol(len(self.params), seed=0).random(fleets.KINDS).tolist()
            drawn = [{n: e.quantile(mass) for (n, e), mass in zip(self.params.items(), p, strict=True)} for p in points]
        needed = {
            str(place): {name: seconds(values) for name, seconds in self.seconds.items()}
            for place, values in enumerate(drawn)
        }
        rate = throughput_bound(needed, self.fleet, dict.fromkeys(needed, 1.0 / len(needed))).rate
        return rate * self.hours * 3600


class Result(NamedTuple):
    """What came of one run."""

    #: trials completed, in the mix of the families
    count: float
    #: that, as a share of the linear program's bound
    share: float
    #: longest wait of a drawn trial, in trials sent meanwhile
    waited: int


def flat_cases(hours: float) -> dict[str, Case]:
    """Return the standard cases."""
    ten = Choice(tuple(OPTIONS)[:10])
    made: dict[str, tuple[Mapping[str, int], Seconds, Mapping[str, Number | Choice]]] = {
        "one number": (FLEET, ONE, {"w": W}),
        "one number, 16 workers": (SMALL, ONE, {"w": W}),
        "two numbers": (
            FLEET,
            {"gpu": lambda p: 20 + 15 * p["w"] * p["d"], "cpu": lambda p: 15 + 600 * p["w"] * p["d"]},
            {"w": W, "d": W},
        ),
        "one of ten options": (FLEET, TABLE, {"m": ten}),
        "one of forty options": (FLEET, TABLE, {"m": Choice(tuple(OPTIONS))}),
        "batch size": (
            FLEET,
            {"gpu": lambda p: 10 + 2000 / p["b"], "cpu": lambda p: 5 + 60 / math.sqrt(p["b"]) + p["b"] / 2},
            {"b": Number(8, 512, is_log=True)},
        ),
        "three classes": (
            THREE,
            {
                "large": lambda p: 20 + 10 * p["w"],
                "small": lambda p: 15 + 60 * p["w"] * p["d"],
                "cpu": lambda p: 10 + 400 * p["w"] * p["d"],
            },
            {"w": W, "d": W},
        ),
        USELESS: (FLEET, {"gpu": lambda _: 30, "cpu": lambda _: 90}, {"w": W, "d": W, "e": W}),
        SPEED_ONLY: (FLEET, {"gpu": lambda p: 20 + 100 * p["w"], "cpu": lambda p: 60 + 300 * p["w"]}, {"w": W}),
    }
    cases = {
        name: Case(fleet=fleet, seconds=seconds, params=params, hours=hours, is_cut=name != USELESS)
        for name, (fleet, seconds, params) in made.items()
    }
    return cases | {f"{MODELS} {place}": models_case(place, min(hours, MODELS_HOURS)) for place in range(1, 6)}


#: spaces of seven models: their name, most hours, steps after which a trial reports, classes, and the two fleets
MODELS, MODELS_HOURS, MODELS_STEPS = "seven models", 2.0, 20
MODELS_CLASSES, MODELS_FLEETS = ("gpu_large", "gpu_small", "cpu"), ((25, 50, 75), (15, 45, 90))


def models_case(place: int, hours: float) -> Case:
    """Return a space whose choice names seven models, drawn by a law with `place` as seed.

    A model takes 30 to 600 s on the best class (log-uniform). It takes 1.2 to 80 times as long on a CPU: the logs of
    these ratios are one draw in each of seven equal parts of the range, in random order, so that some models are nearly
    as fast on a CPU as on the best GPU, and some are hopeless there. The small GPU lies between the two. One or two
    numbers change the seconds, with other exponents on each class. Trials report MODELS_STEPS steps. Had the policy
    known all seconds and the dual prices of the classes from the start, it would complete .95 to 1.03 of the bound in
    two hours: trials of this length are cut off by the end, and the short ones end first.
    """
    generator = np.random.default_rng([8, place])
    fleet = MODELS_FLEETS[place % 2]
    best = np.exp(generator.uniform(math.log(30), math.log(600), 7))
    part = (generator.permutation(7) + generator.random(7)) / 7
    ratio = 1.2 * (80 / 1.2) ** part
    middle = ratio ** generator.uniform(0.1, 0.9, 7)
    numbers = ("w", "d")[: int(generator.integers(1, 3))]
    seconds = {}
    for name, times in zip(MODELS_CLASSES, (best, best * middle, best * ratio), strict=True):
        table = {f"model{option}": round(each, 1) for option, each in enumerate(times.tolist())}
        powers = {number: round(generator.uniform(0.5, 1.5), 2) for number in numbers}
        seconds[name] = partial(_of_model, table, powers)
    model = Choice(tuple(f"model{option}" for option in range(7)))
    slots = dict(zip(MODELS_CLASSES, fleet, strict=True))
    params = {"model": model, **dict.fromkeys(numbers, W)}
    return Case(fleet=slots, seconds=seconds, params=params, hours=hours, steps=MODELS_STEPS)


def _of_model(table: Mapping[str, float], powers: Mapping[str, float], params: Mapping[str, Any]) -> float:
    found = table[params["model"]]
    for number, power in powers.items():
        found *= (0.5 + params[number]) ** power
    return found


USELESS, SPEED_ONLY = "params that tell nothing", "speed only"


# Runs


def run(name: str, hours: float, how: str, seed: int) -> Result:
    """Play a case: `how` is cost, fifo, hand-split, a sampler, or shuffled, which is cost with a wrong model."""
    case = flat_cases(hours)[name]
    if how in ADAPTIVE:
        case = replace(case, hours=min(case.hours, ADAPTIVE_HOURS))
    policy = "fifo" if how == "fifo" else "cost"
    sampler = how if how in ADAPTIVE else "random"
    with patch("shadho_celery.scheduler.plan.CostModel", Shuffled if how == "shuffled" else CostModel):
        split = case.cut() if how == "hand-split" else case.cluster()
        played = simulate(split, policy=policy, sampler=sampler, seed=seed)
    count = min(played.complete[each.name] / each.probability for each in played.plan.subspaces)
    most = best_by_blocks(case, played) if how in ADAPTIVE else case.best()
    return Result(count, count / most * case.hours * 3600 / played.seconds, _longest_wait(played))


class Shuffled(CostModel):
    """A model that is asked of the params of other trials: what it predicts is wrong."""

    def _rates(self, trials: Sequence[Trial | Attempt]) -> Array:
        typical = self.durations.estimate().mean[[self.row_of[trial.subspace] for trial in trials]]
        found = super()._rates(trials) - typical
        return typical + found[np.random.default_rng(len(trials)).permutation(len(found))]


def best_by_blocks(case: Case, played: Simulation) -> float:
    """Return the most trials with the params of those that were played, block after block.

    An adaptive sampler's mix changes with what it learns: no placement can run trials before they are proposed.
    """
    trials = sorted(played.study.trials, key=lambda trial: trial.number)
    size, hours = BLOCK * sum(case.fleet.values()), 0.0
    for start in range(0, len(trials), size):
        block = trials[start : start + size]
        drawn = [played.plan.space.evaluate(trial.params)["params"] for trial in block]
        hours += len(block) * case.hours / case.best(drawn)
    return len(trials) * case.hours / hours


def _longest_wait(played: Simulation) -> int:
    """Return by how many later draws of its subspace a trial was passed over, at most."""
    longest = 0
    by_subspace: dict[str, list[tuple[float, int]]] = {}
    for trial in played.study.trials:
        by_subspace.setdefault(trial.subspace, []).append((trial.started_at or 0.0, trial.number))
    for started in by_subspace.values():
        numbers = [number for _, number in sorted(started)]
        places = {number: place for place, number in enumerate(sorted(numbers))}
        longest = max(longest, *(place - places[number] for place, number in enumerate(numbers)))
    return longest


# Forty structural options


def structural(hours: float, seed: int) -> float:
    """Return the share of the bound where forty options with params of their own are too many to be split."""
    options = [{"k": place, "width": hp.uniform(f"width {place}", 0, 1)} for place in range(len(OPTIONS))]
    space = {
        "a": hp.choice("a", [{"b": hp.uniform("b", 0, 1)}, {"c": hp.uniform("c", 0, 1)}]),
        "n": hp.choice("n", options),
    }
    table = np.array(list(OPTIONS.values()))

    def seconds(params: Params) -> Array:
        option = int(params["n"])
        return table[option] * (0.5 + float(params[f"width {option}"]))

    def play(attempt: Attempt, compute_class: str) -> Outcome:
        luck = np.random.default_rng([attempt.seed, attempt.attempt])
        took = seconds(attempt.params)[list(FLEET).index(compute_class)] * luck.lognormal(-0.045, 0.3)
        return Outcome(state=TrialState.COMPLETE, loss=float(luck.random()), seconds=float(took))

    study = play_study(space, FLEET, play, hours * 3600, seed=seed)
    draws = compile_space(space).sample(np.random.default_rng(0), 4 * fleets.KINDS)
    kinds = {str(place): dict(zip(FLEET, seconds(params).tolist(), strict=True)) for place, params in enumerate(draws)}
    return study.count(TrialState.COMPLETE) / (throughput_bound(kinds, FLEET).rate * study.clock.now())


# The table


WAYS = {
    "cost": "placement by params, learned from nothing",
    "fifo": "first come, first served",
    "hand-split": "cost, with the space cut by hand into a family for each part of the params",
    "tpe": "cost with sampler tpe, whose own mix is the bound's, block after block",
    "auto": "the same with sampler auto",
    "shuffled": "cost with a model that is wrong on purpose: it learns of other trials' params",
    "share of bound": "of the trials that the best placement could complete, had it known all seconds beforehand",
    "longest wait": "trials of its subspace that were sent before a trial drawn earlier",
}


def ways(case: str) -> tuple[str, ...]:
    """Return the ways in which a case is played."""
    if case.startswith(MODELS):
        return ("cost", "fifo", "shuffled")
    return ("cost", "fifo", "hand-split", *ADAPTIVE, "shuffled")


def tell(results: Mapping[tuple[str, str], Sequence[Result]]) -> None:
    """Print one row for each case and way."""
    rows = {}
    for (case, how), runs in results.items():
        shares = _shares(runs)
        rows[f"{case}: {how}"] = {
            "trials": f"{np.mean([each.count for each in runs]):.0f}",
            "share of bound (seeds)": f"{np.mean(shares):.3f} ({min(shares):.3f}-{max(shares):.3f})",
            "longest wait": max(each.waited for each in runs),
        }
    show(rows, "flat space: way")
    print("\n".join(f"{how}: {meaning}" for how, meaning in WAYS.items()))


def goals(results: Mapping[tuple[str, str], Sequence[Result]]) -> dict[str, dict[str, object]]:
    """Return the goals of each case; of what is compared, each seed beside the same one."""
    found = {}
    for case in dict.fromkeys(case for case, _ in results):
        if case in (USELESS, SPEED_ONLY):
            least = 0.99 if case == USELESS else 0.98
            found[f"{case}: beside fifo"] = goal(_beside(results, case, "cost", "fifo"), at_least=least)
        elif case.startswith(MODELS) or (case, "hand-split") in results:
            found[f"{case}: share of bound"] = goal(_shares(results[case, "cost"]), at_least=0.95)
        if (case, "hand-split") in results and case not in (USELESS, SPEED_ONLY):
            found[f"{case}: beside hand-split"] = goal(_beside(results, case, "cost", "hand-split"), at_least=0.98)
            for how in ADAPTIVE:
                found[f"{case}: {how}, share of bound"] = goal(_shares(results[case, how]), at_least=0.90)
        if (case, "shuffled") in results:
            found[f"{case}: shuffled beside fifo"] = goal(_beside(results, case, "shuffled", "fifo"), at_least=0.98)
    return found


def _shares(runs: Sequence[Result]) -> list[float]:
    return [each.share for each in runs]


def _beside(results: Mapping[tuple[str, str], Sequence[Result]], case: str, how: str, other: str) -> list[float]:
    # One trial at least: in a short run a part cut by hand may complete none.
    return beside(*([max(1.0, each.count) for each in results[case, way]] for way in (how, other)))
