"""Flat spaces for the placement benchmark: one family whose seconds depend on params, the same cut by hand, the bound.

A case is a cluster file of the simulator (`--laws FILE` takes others). Cut by hand means a family for each part of the
params that the seconds depend on: each option of a choice, quarters of one number, halves of two. What comes of a flat
space is compared with that, with `fifo`, and with the linear program over kinds of trials whose seconds are known.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import numpy as np
from figures import goal
from hyperopt import hp
from msgspec.structs import replace
from playing import play_study
from rich.console import Console
from rich.table import Table
from scipy.stats import qmc

from shadho_celery.core.trial import Attempt, Outcome, Params, Trial, TrialState
from shadho_celery.placement.bound import throughput_bound
from shadho_celery.predictors.cost_model import CostModel
from shadho_celery.predictors.features import Array
from shadho_celery.simulation.cluster_file import Cluster, Family, parse
from shadho_celery.simulation.params import Choice, Expression, Integer, LogUniform, Param, Uniform
from shadho_celery.simulation.simulation import Simulation, simulate
from shadho_celery.space.compile import compile_space

#: kinds of trials of one family that the linear program tells apart
KINDS = 512
#: samplers that learn from losses; their proposals take milliseconds: they are played for an hour at most
ADAPTIVE, ADAPTIVE_SECONDS = ("tpe", "auto"), 3600.0
#: trials for each slot in a block of theirs, for which there is one bound
BLOCK = 10
#: 150 workers, and the fleet of the issue that asked for this
FLEET, SMALL = {"gpu": 40, "cpu": 110}, {"gpu": 4, "cpu": 12}
THREE = {"large": 25, "small": 50, "cpu": 75}

W = {"law": "uniform", "low": 0, "high": 1}
ONE = {"gpu": "20 + 10 * w", "cpu": "20 + 400 * w"}
#: seconds of forty options on two classes, of which neither is the faster one at all
OPTIONS = {
    f"m{place:02d}": seconds
    for place, seconds in enumerate(
        np.exp(np.random.default_rng(40).normal((3.0, 4.0), 0.8, (40, 2))).round(1).tolist()
    )
}
TABLE = {
    name: str({option: seconds[place] for option, seconds in OPTIONS.items()}) + "[m]"
    for place, name in enumerate(("gpu", "cpu"))
}


class Result(NamedTuple):
    """What came of one run."""

    #: trials completed, in the mix of the families
    count: float
    #: that, as a share of the linear program's bound
    share: float
    #: longest wait of a drawn trial, in trials sent meanwhile
    waited: int


def flat_cases(hours: float) -> dict[str, Cluster]:
    """Return the standard cases."""
    made = {
        "one number": (FLEET, ONE, {"w": W}),
        "one number, 16 workers": (SMALL, ONE, {"w": W}),
        "two numbers": (FLEET, {"gpu": "20 + 15 * w * d", "cpu": "15 + 600 * w * d"}, {"w": W, "d": W}),
        "one of ten options": (FLEET, _first(10), {"m": {"law": "choice", "options": list(OPTIONS)[:10]}}),
        "one of forty options": (FLEET, TABLE, {"m": {"law": "choice", "options": list(OPTIONS)}}),
        "batch size": (
            FLEET,
            {"gpu": "10 + 2000 / b", "cpu": "5 + 60 / sqrt(b) + b / 2"},
            {"b": {"law": "loguniform", "low": 8, "high": 512}},
        ),
        "three classes": (
            THREE,
            {"large": "20 + 10 * w", "small": "15 + 60 * w * d", "cpu": "10 + 400 * w * d"},
            {"w": W, "d": W},
        ),
        USELESS: (FLEET, {"gpu": "30", "cpu": "90"}, {"w": W, "d": W, "e": W}),
        SPEED_ONLY: (FLEET, {"gpu": "20 + 100 * w", "cpu": "60 + 300 * w"}, {"w": W}),
    }
    of_models = {f"{MODELS} {place}": models_case(place, min(hours, MODELS_HOURS)) for place in range(1, 6)}
    return {name: describe(*each, hours) for name, each in made.items()} | of_models


#: spaces of seven models: their name, most hours, steps after which a trial reports, classes, and the two fleets
MODELS, MODELS_HOURS, MODELS_STEPS = "seven models", 2.0, 20
MODELS_CLASSES, MODELS_FLEETS = ("gpu_large", "gpu_small", "cpu"), ((25, 50, 75), (15, 45, 90))


def models_case(place: int, hours: float) -> Cluster:
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
        powers = [f"(0.5 + {number}) ** {generator.uniform(0.5, 1.5):.2f}" for number in numbers]
        seconds[name] = " * ".join([f"{table}[model]", *powers])
    model = {"law": "choice", "options": [f"model{option}" for option in range(7)]}
    slots = dict(zip(MODELS_CLASSES, fleet, strict=True))
    return describe(slots, seconds, {"model": model, **dict.fromkeys(numbers, W)}, hours, steps=MODELS_STEPS)


USELESS, SPEED_ONLY = "params that tell nothing", "speed only"


def _first(options: int) -> dict[str, str]:
    names = list(OPTIONS)[:options]
    return {
        name: str({option: OPTIONS[option][place] for option in names}) + "[m]"
        for place, name in enumerate(("gpu", "cpu"))
    }


def describe(
    fleet: Mapping[str, int], seconds: Mapping[str, Any], params: Mapping[str, Any], hours: float, **top: Any
) -> Cluster:
    """Return a cluster with one family, and these further keys at the top of its file."""
    return parse(
        {
            **top,
            "seconds": hours * 3600,
            "classes": {name: {"workers": workers} for name, workers in fleet.items()},
            "families": {"flat": {"seconds": dict(seconds), "params": dict(params)}},
            "size": {"law": "lognormal", "sigma": 0.3},
            "straggler": {"law": "halfnormal", "scale": 0.5},
        }
    )


def best(cluster: Cluster, values: Mapping[str, Sequence[Mapping[str, Any]]] | None = None) -> float:
    """Return the most trials in the families' mix that any placement could complete in the cluster's time.

    `values` are those of the params of each family's trials; draws from their laws by default.
    """
    assert cluster.seconds is not None
    needed: dict[str, dict[str, float]] = {}
    mix: dict[str, float] = {}
    for name, family in cluster.families.items():
        drawn = (values or {}).get(name) or _kinds(family)
        for place, each in enumerate(drawn):
            kind = f"{name} {place}"
            needed[kind] = {c: family.seconds_on(c, each) / (1.0 - family.failure_rate) for c in cluster.slots}
            mix[kind] = family.share / len(drawn)
    there = {name: workers * 1.0 for name, workers in cluster.slots.items()}
    for change in cluster.changes:
        there[change.compute_class] += change.slots * max(0.0, 1.0 - change.at / cluster.seconds)
    return throughput_bound(needed, there, mix).rate * cluster.seconds


def _kinds(family: Family) -> list[dict[str, Any]]:
    """Return values of the params that cover their laws evenly."""
    if not family.params:
        return [{}]
    points = qmc.Sobol(len(family.params), seed=0).random(KINDS)
    return [family.values(point) for point in points.tolist()]


# Cut by hand


def cut(cluster: Cluster) -> Cluster:
    """Return the cluster with each family cut into parts by the params that its seconds depend on."""
    families: dict[str, Family] = {}
    for name, family in cluster.families.items():
        parts = _parts(family)
        for place, params in enumerate(parts):
            part = replace(family, params={**family.params, **params}, share=family.share / len(parts))
            families[f"{name} {place}" if len(parts) > 1 else name] = part
    return replace(cluster, families=families)


def _parts(family: Family) -> list[dict[str, Param]]:
    used = {word for each in family.seconds.values() if isinstance(each, Expression) for word in _words(each.text)}
    chosen = [(name, law) for name, law in family.params.items() if name in used]
    numbers = [name for name, law in chosen if not isinstance(law, Choice)][:2]
    each = {1: 4, 2: 2}.get(len(numbers), 1)
    pieces = [
        [{name: piece} for piece in _pieces(law, each)]
        for name, law in chosen
        if name in numbers or isinstance(law, Choice)
    ]
    return [{k: v for piece in combination for k, v in piece.items()} for combination in itertools.product(*pieces)]


def _words(text: str) -> list[str]:
    return re.findall(r"[A-Za-z_]\w*", text)


def _pieces(law: Param, number: int) -> list[Param]:
    if isinstance(law, Choice):
        return [Choice(options=[option]) for option in law.options]
    if isinstance(law, LogUniform):
        ends = np.exp(np.linspace(math.log(law.low), math.log(law.high), number + 1)).tolist()
        return [LogUniform(low=low, high=high) for low, high in itertools.pairwise(ends)]
    if isinstance(law, Uniform):
        ends = np.linspace(law.low, law.high, number + 1).tolist()
        return [Uniform(low=low, high=high) for low, high in itertools.pairwise(ends)]
    assert isinstance(law, Integer)
    ends = np.linspace(law.low, law.high + 1, min(number, law.high + 1 - law.low) + 1).round().astype(int).tolist()
    return [Integer(low=low, high=high - 1) for low, high in itertools.pairwise(ends)]


# Runs


def run(cluster: Cluster, how: str, seed: int) -> Result:
    """Play a cluster: `how` is cost, fifo, hand-split, a sampler, or shuffled, which is cost with a wrong model."""
    if how in ADAPTIVE:
        cluster = replace(cluster, seconds=min(cluster.seconds or ADAPTIVE_SECONDS, ADAPTIVE_SECONDS))
    policy = "fifo" if how == "fifo" else "cost"
    sampler = how if how in ADAPTIVE else "random"
    with patch("shadho_celery.scheduler.plan.CostModel", Shuffled if how == "shuffled" else CostModel):
        split = cut(cluster) if how == "hand-split" else cluster
        played = simulate(split, policy=policy, sampler=sampler, seed=seed)
    shares = split.shares
    count = min(played.complete[name] * sum(shares.values()) / share for name, share in shares.items())
    most = best_by_blocks(cluster, played) if how in ADAPTIVE else best(cluster)
    return Result(count, count / most * (cluster.seconds or 0.0) / played.seconds, _longest_wait(played))


class Shuffled(CostModel):
    """A model that is asked of the params of other trials: what it predicts is wrong."""

    def _rates(self, trials: Sequence[Trial | Attempt]) -> Array:
        typical = self.durations.estimate().mean[[self.row_of[trial.subspace] for trial in trials]]
        found = super()._rates(trials) - typical
        return typical + found[np.random.default_rng(len(trials)).permutation(len(found))]


def best_by_blocks(cluster: Cluster, played: Simulation) -> float:
    """Return the most trials with the params of those that were played, block after block.

    An adaptive sampler's mix changes with what it learns: no placement can run trials before they are proposed.
    """
    assert cluster.seconds is not None
    trials = sorted(played.study.trials, key=lambda trial: trial.number)
    size = BLOCK * sum(cluster.slots.values())
    seconds = 0.0
    for start in range(0, len(trials), size):
        block = trials[start : start + size]
        found: dict[str, list[dict[str, Any]]] = {}
        for trial in block:
            name = trial.subspace.removeprefix("family=")
            laws = cluster.families[name].params
            values = {param: law.value(trial.params[f"{param} of {name}"]) for param, law in laws.items()}
            found.setdefault(name, []).append(values)
        seconds += len(block) * cluster.seconds / best(cluster, found)
    return len(trials) * cluster.seconds / seconds


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


def structural(policy: str, seed: int, hours: float) -> float:
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

    study = play_study(space, FLEET, play, hours * 3600, policy=policy, seed=seed)
    draws = compile_space(space).sample(np.random.default_rng(0), 4 * KINDS)
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


def ways(case: str, cluster: Cluster) -> tuple[str, ...]:
    """Return the ways in which a case is played."""
    if case.startswith(MODELS):
        return ("cost", "fifo", "shuffled")
    given = any(family.params for family in cluster.families.values())
    return ("cost", "fifo", "hand-split", *ADAPTIVE, "shuffled") if given else ("cost", "fifo")


def show(results: Mapping[tuple[str, str], Sequence[Result]]) -> None:
    """Print one row for each case and way."""
    table = Table("flat space", "way", "trials", "share of bound (seeds)", "longest wait, trials")
    for (case, how), runs in results.items():
        shares = [each.share for each in runs]
        table.add_row(
            case,
            how,
            f"{np.mean([each.count for each in runs]):.0f}",
            f"{np.mean(shares):.3f} ({min(shares):.3f}-{max(shares):.3f})",
            str(max(each.waited for each in runs)),
        )
    console = Console(width=118)
    console.print(table)
    console.print("\n".join(f"{how}: {meaning}" for how, meaning in WAYS.items()), soft_wrap=True)


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
    pairs = zip(results[case, how], results[case, other], strict=True)
    return [max(1.0, one.count) / max(1.0, two.count) for one, two in pairs]
