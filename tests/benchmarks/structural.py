"""Searches of spaces with many subspaces: `auto` beside the TPEs of Optuna and hyperopt, and SMAC3.

Peers come from a recorded table, which ``--full --smac PYTHON`` renews: an interpreter that has SMAC3, in an
environment of its own (``pip install smac==2.4.*``). If boxes are moved, spaces come from a file or seeds are not the
recorded ones, the peers run beside ours, SMAC3 only if it is given. Every search has 100 evaluations. SMAC3 is told so;
it uses up to a quarter of them for its initial design.

`tpe` by itself is not among them. Its fixed weights of trials of other subspaces were compared with two mixtures of
its density and one of independent labels, learned from all subspaces. The figures are means of log10 of the ratio of
the regrets, after 30, 60 and 100 evaluations:
- half and half, on 44 seeds: -.04, -.08 and -.07 (+- .06), in up to 1.7 times the time of a search. Better where labels
  behave alike, but with nothing in common (own_10) the median after 100 evaluations rose from .02 to .07. With nine
  tenths of independent labels (six spaces): .01, .06 and .13.
- a part that is learned, by the leave-one-out likelihood of the good trials, on 22 seeds of six spaces: -.03, -.08 and
  -.08 (+- .1), in twice the time.

The best tenth of a subspace's own trials counts as good in it, rounded, so that there is none for fewer than five. On
22 seeds this changed the means by .01, -.03 and -.03 (+- .03): better with nothing in common (-.25 after 100), worse
where labels behave alike (.06). Rounded up, it lost .15, .15 and .17. On `svm` and `tree`, of which one branch has a
narrow valley, the median regret after 100 evaluations of 80 seeds fell from .13 to .002, and from .50 to .31.
"""

from __future__ import annotations

import json
import statistics
from argparse import Namespace
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from figures import goal, p_no_worse, results_of
from peers import search, search_with_smac
from problems import Problem, problems_of
from structures import APART, STRUCTURES

from shadho_celery.space.compile import compile_space
from shadho_celery.space.split import split

Json = dict[str, Any]
#: the regret of a search after each number of AT
Run = Sequence[float]

#: evaluations after which there is a figure, and the part of the spaces on which `auto` is no worse than the best peer
AT: Mapping[int, float] = {30: 6 / 8, 60: 7 / 8, 100: 7 / 8}
LIBRARIES, SMAC = ("optuna tpe", "optuna multivariate", "hyperopt tpe"), "smac"
PEERS = (*LIBRARIES, SMAC)
#: `auto` when each subspace had a sampler of its own, which learnt from that subspace only
BEFORE = "before"
TABLE = Path(__file__).parent / "data" / "structural_peers.json"
#: seeds of the recorded table, and of SMAC3
SEEDS, SMAC_SEEDS = 11, 5


@cache
def problems(file: Path | None, shift: int | None) -> Mapping[str, Problem]:
    """Return the spaces, or those of a file, moved if that is asked for."""
    found = problems_of(file) if file else STRUCTURES
    return found if shift is None else {name: each.shifted(shift) for name, each in found.items()}


def regrets(where: tuple[Path | None, int | None], name: str, algorithm: str, seed: int, python: str) -> list[float]:
    """Return the regret after each number of AT. `where` are the arguments of `problems`, `python` is SMAC3's."""
    problem, trials = problems(*where)[name], max(AT)
    assert problem.optimum is not None
    if algorithm == SMAC:
        losses = search_with_smac(problem, seed, trials, python)
    else:
        losses = search(problem, algorithm, seed, trials)
    best = np.minimum.accumulate(losses) - problem.optimum
    return [float(best[at - 1]) for at in AT]


def structural(arguments: Namespace, processes: ProcessPoolExecutor) -> tuple[Json, Json]:
    """Return medians of the regret by space, sampler and evaluations, and their goals."""
    where = (arguments.problems, arguments.shift)
    first, seeds = arguments.first_seed, arguments.seeds
    is_recorded = where == (None, None) and first == 0 and (seeds == SEEDS if arguments.full else seeds <= SEEDS)
    peers = () if is_recorded and not arguments.full else PEERS if arguments.smac else LIBRARIES
    counts = dict.fromkeys(("auto", *peers), seeds) | ({SMAC: min(seeds, SMAC_SEEDS)} if SMAC in peers else {})
    runs = {
        (name, algorithm): [
            processes.submit(regrets, where, name, algorithm, seed, arguments.smac)
            for seed in range(first, first + count)
        ]
        for name in problems(*where)
        for algorithm, count in counts.items()
    }
    found = results_of(runs, "searches of structures")
    rows = {name: {row: each for (space, row), each in found.items() if space == name} for name in problems(*where)}
    if arguments.full and is_recorded:
        record(rows)
    if is_recorded:
        for name, recorded in json.loads(TABLE.read_text()).items():
            rows[name] |= {row: each[:seeds] for row, each in recorded.items()}
    figures = {name: compare(problems(*where)[name], row) for name, row in rows.items()}
    show(figures)
    return figures, goals_of(figures)


def record(rows: Mapping[str, Mapping[str, Sequence[Run]]]) -> None:
    """Write the peers' table. The row of `auto` before the change stays as it is."""
    before = {name: row[BEFORE] for name, row in json.loads(TABLE.read_text()).items()} if TABLE.is_file() else {}
    kept = {name: {**row, BEFORE: before.get(name, row["auto"])} for name, row in rows.items()}
    table = {
        name: {peer: [[float(f"{each:.4g}") for each in run] for run in row[peer]] for peer in (*PEERS, BEFORE)}
        for name, row in kept.items()
    }
    TABLE.write_text(json.dumps(table, separators=(",", ":")) + "\n")


def compare(problem: Problem, rows: Mapping[str, Sequence[Run]]) -> Json:
    """Return one space's figures by number of evaluations: medians, the best peer, and `auto` against it."""
    equal, at_each = problem.equal(), {}
    for place, at in enumerate(AT):
        regret = {name: [max(run[place], equal) for run in runs] for name, runs in rows.items()}
        best = min((name for name in rows if name in PEERS), key=lambda name: statistics.median(regret[name]))
        p = p_no_worse(regret["auto"], regret[best])
        at_each[str(at)] = {
            "median_regret": {name: statistics.median(run[place] for run in runs) for name, runs in rows.items()},
            "best_peer": best,
            "p_no_worse": p,
            "is_no_worse": p >= 0.05,
        }
        if BEFORE in regret:
            at_each[str(at)]["is_no_worse_than_before"] = p_no_worse(regret["auto"], regret[BEFORE]) >= 0.05
    return {"subspaces": len(split(compile_space(problem.space))), "equal": equal, "at": at_each}


def show(figures: Mapping[str, Json]) -> None:
    """Print medians, and where `auto` is worse."""
    algorithms = [*next(iter(figures.values()))["at"][str(max(AT))]["median_regret"]]
    names = (
        name.replace("multivariate", "group").replace("hyperopt", "h.").replace("optuna", "o.") for name in algorithms
    )
    print(f"{'median regret':14s} subspaces after" + "".join(f" {name:>10s}" for name in names))
    for name, row in figures.items():
        for at, each in row["at"].items():
            word = "" if each["is_no_worse"] else f"  worse than {each['best_peer']}, p = {each['p_no_worse']:.2g}"
            first = f"{name:14s} {row['subspaces']:9d}" if at == str(min(AT)) else " " * 24
            print(f"{first} {at:>5s}" + "".join(f" {each['median_regret'][key]:10.3g}" for key in algorithms) + word)


def goals_of(figures: Mapping[str, Json]) -> Json:
    """Return the goals. Those against the state before need its recorded row."""
    goals = {
        f"part of the spaces on which auto is no worse than the best peer, after {at}": goal(
            statistics.mean(row["at"][str(at)]["is_no_worse"] for row in figures.values()), at_least=part
        )
        for at, part in AT.items()
    }
    for at in AT:
        kept = [figures[name]["at"][str(at)].get("is_no_worse_than_before") for name in APART if name in figures]
        if kept and None not in kept:
            title = f"part of the spaces with nothing in common on which auto is no worse than before, after {at}"
            goals[title] = goal(statistics.mean(kept), at_least=1.0)
    return goals
