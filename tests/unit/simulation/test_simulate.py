"""A simulation is the real search on described machines: the same for the same seed, and no slot idle."""

from __future__ import annotations

import csv
import json
import math
import shlex
import sys
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hyperopt import hp
from msgspec import structs
from services.families import Family, cluster_of, fleet_of, half_normal, log_normal, samples, with_settings

from shadho_celery.core.trial import Trial, TrialState
from shadho_celery.placement.policies import POLICIES
from shadho_celery.simulate import COLUMNS, EXAMPLE, main
from shadho_celery.simulation import simulation
from shadho_celery.simulation.executor import Change
from shadho_celery.simulation.simulation import LEAST_SECONDS, Cluster, Machine, Simulation, simulate
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.state import MAX_LOST, StudyState

S = TrialState

#: turns after which a simulation is taken to be endless
PATIENCE = 20_000

#: each policy, and each kind of shares
BOTH = [("cost", "promise"), ("cost", "uniform"), ("fifo", "even"), ("paper", "paper")]

FAMILIES = {
    "net": Family(seconds={"large": 20, "small": 60, "cpu": 600}, share=2.0, failure_rate=0.05),
    "forest": Family(seconds={"large": 50, "small": 60, "cpu": 70}, best=0.1, failure_rate=0.05),
    "svm": Family(seconds={"large": 30, "small": 30, "cpu": 30}, best=0.2, spread=2.0, failure_rate=0.05),
}
#: three unlike classes
CLASSES: Mapping[str, int] = {"large": 3, "small": 4, "cpu": 5}
#: factors of trials that are to take as long in every attempt; and of trials that all take the mean of their family
STEADY = {"straggler": partial(half_normal, 0.0)}
ALIKE = {**STEADY, "size": partial(half_normal, 0.0)}


def cluster(
    classes: Mapping[str, int | Mapping[str, Any]] = CLASSES,
    families: Mapping[str, Family] = FAMILIES,
    *,
    seconds: float | None = 900.0,
    trials: int | None = None,
    factors: Mapping[str, Any] | None = None,
    **facts: Any,
) -> Cluster:
    """Three unlike classes and three unlike families, a quarter of an hour."""
    given = {"size": partial(log_normal, 0.5), "straggler": partial(half_normal, 0.5), **(factors or {})}
    made = cluster_of(fleet_of(classes, **facts), families, {}, **given)
    return with_settings(made, seconds=seconds, trials=trials)


def with_fleet(described: Cluster, **facts: Any) -> Cluster:
    """The cluster with these other facts of its fleet."""
    return replace(described, fleet=structs.replace(described.fleet, **facts))


def family_of(trial: Trial) -> str:
    return trial.subspace.removeprefix("family=")


def play(described: Cluster, **options: Any) -> Simulation:
    """The simulation, which must come to an end."""
    turns = 0

    def on_turn(study: StudyState) -> None:
        nonlocal turns
        turns += 1
        if turns > PATIENCE:
            pytest.fail(f"no end after {study.clock.now()} simulated seconds")

    return simulate(described, on_turn=on_turn, **options)


def facts(simulation: Simulation) -> str:
    """Everything but what the playing itself took; repr, so that every bit of a float shows."""
    names = ("policy", "shares", "seed", "seconds", "complete", "failed", "placed", "lost", "utilisation", "best")
    return repr([getattr(simulation, name) for name in names] + list(simulation.study))


def fates(simulation: Simulation) -> dict[tuple[str, int], tuple[float, TrialState, float]]:
    """What became of the trials that ended, by family and seed: x, state and size, that is its part of the mean."""
    found: dict[tuple[str, int], tuple[float, TrialState, float]] = {}
    for trial in simulation.study.trials:
        family = family_of(trial)
        seconds = FAMILIES[family].seconds
        assert isinstance(seconds, Mapping)
        size = (trial.outcome.seconds or 0.0) / seconds[str(trial.compute_class)]
        found[family, trial.seed] = (trial.params[f"x {family}"], trial.state, float(f"{size:.9g}"))
    return found


# The same again


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "shares"), BOTH)
def test_the_same_seed_gives_the_same_to_the_bit_and_another_seed_another(policy: str, shares: str) -> None:
    described = cluster(seconds=300.0, changes=[Change(at=100, compute_class="small", workers=-2)])
    first, second, other = (play(described, policy=policy, shares=shares, seed=seed) for seed in (4, 4, 5))
    assert facts(first) == facts(second)
    assert [t.params for t in first.study] != [t.params for t in other.study][: len(first.study)]
    assert [t.outcome.seconds for t in first.study.trials] != [t.outcome.seconds for t in other.study.trials]


def test_the_seed_is_the_clusters_unless_another_is_given() -> None:
    own, other = cluster(seconds=100.0, seed=9), cluster(seconds=100.0, seed=1)
    first = play(own)
    assert first.seed == 9
    assert facts(first) == facts(play(other, seed=9))


@pytest.mark.slow
@pytest.mark.parametrize("policy", sorted({*POLICIES} - {"fifo"}))
def test_every_policy_gets_the_same_trials_whatever_it_does_with_them(policy: str) -> None:
    """The same params, sizes and failures: what differs is who runs them, and when."""
    by_fifo, by_policy = play(cluster(), policy="fifo"), play(cluster(), policy=policy)
    one, other = fates(by_fifo), fates(by_policy)
    both = set(one) & set(other)
    assert len(both) > 50
    assert {S.COMPLETE, S.FAILED} == {one[key][1] for key in both}
    for key in both:
        assert one[key] == other[key]
    assert [trial.compute_class for trial in by_fifo.study] != [trial.compute_class for trial in by_policy.study]


# No slot idle


def busy(study: StudyState, name: str) -> int:
    return study.count(S.RUNNING, S.QUEUED, compute_class=name)


@pytest.mark.slow
@pytest.mark.parametrize(("policy", "shares"), BOTH)
def test_at_every_moment_all_slots_are_busy(policy: str, shares: str) -> None:
    described = cluster()
    moments = []

    def on_turn(study: StudyState) -> None:
        moments.append(study.clock.now())
        if study.clock.now() < 900:
            assert {name: busy(study, name) for name in CLASSES} == CLASSES

    found = simulate(described, policy=policy, shares=shares, on_turn=on_turn)
    assert len(moments) > 50
    assert moments[-1] == found.seconds == 900
    assert found.utilisation == {"large": pytest.approx(1), "small": pytest.approx(1), "cpu": pytest.approx(1)}


@pytest.mark.parametrize("policy", POLICIES)
def test_workers_that_come_get_work_at_once_though_nothing_else_happens(policy: str) -> None:
    """The others are in the middle of an hour's trial then."""
    families = {
        "net": Family(seconds={"large": 3600, "cpu": 3600}),
        "svm": Family(seconds={"large": 3600, "cpu": 3600}),
    }
    changes = [Change(at=100, compute_class="cpu", workers=3), Change(at=150, compute_class="large", workers=1)]
    described = cluster({"large": 2, "cpu": 0}, families, factors=ALIKE, changes=changes, seconds=5000.0)
    found = play(described, policy=policy)
    starts = Counter((t.compute_class, t.started_at) for t in found.study if t.attempt)
    assert starts == {
        ("large", 0.0): 2, ("large", 3600.0): 2, ("large", 150.0): 1, ("large", 3750.0): 1,
        ("cpu", 100.0): 3, ("cpu", 3700.0): 3,
    }  # fmt: skip
    assert found.utilisation == {"large": 1.0, "cpu": 1.0}


@pytest.mark.parametrize("policy", POLICIES)
def test_a_class_that_appears_late_gets_its_part_of_the_work(policy: str) -> None:
    changes = [Change(at=250, compute_class="large", workers=3)]
    found = play(cluster({**CLASSES, "large": 0}, changes=changes, seconds=500.0), policy=policy)
    starts = [t.started_at or 0.0 for t in found.study if t.compute_class == "large"]
    assert min(starts) == 250
    assert len([t for t in found.study.trials if t.compute_class == "large"]) > 10
    assert found.utilisation["large"] == pytest.approx(1)


# Deaths


def test_what_died_with_its_worker_is_run_again_and_counts_once() -> None:
    described = cluster(
        seconds=None,
        trials=80,
        factors=STEADY,
        changes=[
            Change(at=100, compute_class="cpu", workers=-3),
            Change(at=200, compute_class="large", workers=-1),
            Change(at=400, compute_class="cpu", workers=2),
        ],
    )
    found = play(described, shares="even")
    assert found.lost == 4
    assert found.trials == found.study.counted == len(found.study) == 80
    assert Counter(trial.number for trial in found.study.trials) == Counter(range(80))
    again = [trial for trial in found.study if trial.lost]
    assert min(trial.attempt for trial in again) == 2
    assert len(again) == 4
    without = play(with_fleet(described, changes=()), shares="even")
    assert fates(found) == fates(without), "deaths cost time and no trial"
    assert sum(found.complete.values()) == sum(n for row in found.placed.values() for n in row.values())


def test_a_lost_trial_is_known_to_be_after_the_lease() -> None:
    described = cluster(lease_seconds=77.0, changes=[Change(at=100, compute_class="cpu", workers=-5)], seconds=300.0)
    found = play(described)
    again = [trial for trial in found.study if trial.lost]
    assert len(again) == 5
    assert {trial.started_at for trial in again if trial.started_at and trial.started_at < 177} == set()


def test_a_trial_whose_workers_die_again_and_again_fails_and_the_search_goes_on() -> None:
    changes = []
    for turn in range(MAX_LOST):
        at = 10.0 + 100 * turn
        changes += [Change(at=at + 40 * by, compute_class="only", workers=2 * by - 1) for by in (0, 1)]
    families = {"net": Family(seconds={"only": 70})}
    found = play(cluster({"only": 1}, families, factors=ALIKE, changes=changes, seconds=None, trials=3))
    assert (found.lost, found.failed, found.complete) == (MAX_LOST, {"family=net": 1}, {"family=net": 2})
    assert "its worker died" in str(found.study.trial(0).outcome.error)
    # Nobody saw the end of the one that failed.
    assert [row[0] for row in found.rows()] == [1, 2]


@pytest.mark.parametrize("lease_seconds", [0.0, 30.0])
def test_with_all_workers_dead_for_ever_a_simulation_ends_all_the_same(lease_seconds: float) -> None:
    deaths = [Change(at=100, compute_class=name, workers=-9) for name in CLASSES]
    found = play(cluster(seconds=None, trials=1000, changes=deaths, lease_seconds=lease_seconds))
    assert found.seconds == 100 + lease_seconds
    assert 0 < found.trials < 1000
    assert found.lost == 12
    assert found.study.in_flight == 0


def test_with_all_workers_dead_a_simulation_of_some_time_lasts_that_time() -> None:
    deaths = [Change(at=100, compute_class=name, workers=-9) for name in CLASSES]
    found = play(cluster(changes=deaths))
    assert found.seconds == 900
    assert max(trial.finished_at or 0.0 for trial in found.study.trials) <= 100


def test_where_no_time_passes_nothing_is_divided_by_it() -> None:
    """All workers die as they come."""
    changes = [Change(at=0, compute_class="cpu", workers=1), Change(at=0, compute_class="cpu", workers=-1)]
    found = play(cluster(dict.fromkeys(CLASSES, 0), seconds=None, trials=5, changes=changes))
    assert (found.seconds, found.trials, found.best, found.balanced_an_hour) == (0, 0, None, 0)


def test_utilisation_counts_what_was_lost_and_only_slots_that_lived() -> None:
    changes = [
        Change(at=100, compute_class="cpu", workers=-5),
        Change(at=250, compute_class="cpu", workers=4),
        Change(at=290, compute_class="small", workers=-4),
    ]
    found = play(cluster(changes=changes, seconds=300.0))
    assert found.utilisation == {"large": pytest.approx(1), "small": pytest.approx(1), "cpu": pytest.approx(1)}
    assert max(found.utilisation.values()) <= 1


# Limits, and what there may be few of


@pytest.mark.parametrize(("policy", "shares"), BOTH)
def test_all_trials_may_fail(policy: str, shares: str) -> None:
    families = {name: replace(family, failure_rate=1.0) for name, family in FAMILIES.items()}
    found = play(cluster(families=families, seconds=150.0), policy=policy, shares=shares)
    assert sum(found.complete.values()) == 0
    assert min(found.failed.values()) > 0
    assert (found.best, found.best_after) == (None, None)
    assert found.utilisation["cpu"] == pytest.approx(1)


@pytest.mark.parametrize(("policy", "shares"), BOTH)
def test_one_class_and_one_family_will_do(policy: str, shares: str) -> None:
    described = cluster({"cpu": 2}, {"net": Family(seconds={"cpu": 10})}, seconds=101.0, factors=ALIKE)
    found = play(described, policy=policy, shares=shares)
    name = "family=net"
    assert (found.complete, found.failed, found.placed) == ({name: 20}, {name: 0}, {name: {"cpu": 20}})
    assert [(row[3], row[4], row[5]) for row in found.rows()][:4] == [(0, 0, 10), (1, 0, 10), (0, 10, 20), (1, 10, 20)]


@pytest.mark.parametrize("trials", [1, 12, 13])
def test_a_limit_on_trials_is_kept_to_the_trial(trials: int) -> None:
    """Of 12 slots."""
    found = play(cluster(seconds=None, trials=trials))
    assert found.trials == len(found.study) == trials


def test_a_target_ends_it_as_soon_as_it_is_reached() -> None:
    found = play(cluster(seconds=50_000.0), target=0.01)
    assert found.best is not None
    assert found.best <= 0.01
    assert found.best_after == found.seconds < 50_000
    assert sum((trial.outcome.loss or math.inf) <= 0.01 for trial in found.study.trials) == 1


def test_the_end_of_the_time_is_the_end_whatever_runs_then() -> None:
    found = play(cluster(seconds=123.5))
    assert found.seconds == 123.5
    assert found.study.in_flight == 12
    assert max(trial.finished_at or 0.0 for trial in found.study.trials) <= 123.5


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cost", "fifo"])
def test_unequal_weights_share_the_trials_out(policy: str) -> None:
    families = {name: replace(family, failure_rate=0.0) for name, family in FAMILIES.items()}
    families["svm"] = replace(families["svm"], share=0.5)
    found = play(cluster(families=families, seconds=3600.0), policy=policy)
    dealt = Counter(family_of(trial) for trial in found.study if trial.state is not S.WAITING)
    parts = {"net": 2 / 3.5, "forest": 1 / 3.5, "svm": 0.5 / 3.5}
    for name, part in parts.items():
        assert dealt[name] / sum(dealt.values()) == pytest.approx(part, rel=0.1)
    hours = found.seconds / 3600
    least = min(found.complete[f"family={name}"] / part for name, part in parts.items())
    assert found.balanced_an_hour == pytest.approx(least / hours)


def test_the_shares_of_a_fixed_number_of_trials_are_exact() -> None:
    found = play(cluster(seconds=None, trials=120))
    assert Counter(family_of(trial) for trial in found.study) == {"net": 60, "forest": 30, "svm": 30}


def test_the_loss_is_what_the_function_gives_for_the_values_of_the_trial() -> None:
    for trial in play(cluster(seconds=200.0)).study.trials:
        family, x = FAMILIES[family_of(trial)], float(trial.params[f"x {family_of(trial)}"])
        if trial.state is S.COMPLETE:
            assert trial.outcome.loss == family.best + family.spread * (x - 0.3) ** 2


def test_no_trial_takes_no_time_however_small_its_factors_are() -> None:
    """Or a simulation would not get on."""
    families = {"net": Family(seconds=dict.fromkeys(CLASSES, 0.001))}
    sizes = {"size": partial(samples, (0.0, 0.0, 0.0, 1.0))}
    found = play(cluster(families=families, factors=sizes, seconds=0.02))
    assert found.seconds == 0.02
    assert min(trial.outcome.seconds or 0.0 for trial in found.study.trials) == LEAST_SECONDS


# Memory


def with_memory(large: int, small: int, cpu: int, **needs: int) -> Cluster:
    families = {n: replace(f, memory_gib=needs.get(n, 0), failure_rate=0.0) for n, f in FAMILIES.items()}
    sizes = {"large": large, "small": small, "cpu": cpu}
    classes = {name: {"workers": workers, "memory_gib": sizes[name]} for name, workers in CLASSES.items()}
    return cluster(classes, families, seconds=1200.0)


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["cost", "fifo"])
def test_a_family_too_large_for_a_class_is_soon_not_sent_there(policy: str) -> None:
    found = play(with_memory(40, 11, 4, net=20, forest=8), policy=policy)
    net = found.placed["family=net"]
    assert net["large"] > 10
    assert (net["small"], net["cpu"], found.placed["family=forest"]["cpu"]) == (0, 0, 0)
    failures = [trial for trial in found.study.trials if trial.state is S.FAILED]
    assert {trial.outcome.error for trial in failures} == {"out of memory"}
    # On the small class a trial of it takes 60 s in the mean; out of memory it is over after a tenth of that.
    small = [
        trial.outcome.seconds or 0.0
        for trial in failures
        if (trial.compute_class, family_of(trial)) == ("small", "net")
    ]
    assert min(small) > 0.1 * 60 / 5
    assert max(small) < 0.1 * 60 * 5
    assert len(failures) < 60
    assert max(trial.finished_at or 0.0 for trial in failures) < 600, "it was learned"
    assert found.utilisation["cpu"] > 0.95


@pytest.mark.slow
def test_a_family_that_no_class_has_the_memory_for_fails_and_the_others_go_on() -> None:
    found = play(with_memory(40, 11, 4, net=100))
    assert found.complete["family=net"] == 0
    assert found.failed["family=net"] > 0
    assert min(found.complete["family=forest"], found.complete["family=svm"]) > 0
    assert found.utilisation["large"] == pytest.approx(1)


# The command


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """The example with less time, its changes within it, in a folder of this test's own."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield write(EXAMPLE)
    sys.modules.pop("cluster", None)


def write(text: str, seconds: int = 300) -> str:
    """Write the file, with this time and its changes within it."""
    text = text.replace('"seconds": 10800', f'"seconds": {seconds}')
    text = text.replace("3600", str(seconds // 4)).replace("5400", str(seconds // 2))
    sys.modules.pop("cluster", None)
    Path("cluster.py").write_text(text)
    return "cluster.py"


def answer(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 0, result.output
    assert result.stderr == ""
    return result.stdout


def strictly(text: str) -> Any:
    """JSON as it is defined: NaN and Infinity are not in it."""
    return json.loads(text, parse_constant=lambda token: pytest.fail(f"{token} is no JSON"))


def refused(*words: str) -> str:
    result = CliRunner().invoke(main, words)
    assert result.exit_code == 2, result.output
    assert isinstance(result.exception, SystemExit)
    assert result.stdout == ""
    lines = [line for line in result.stderr.splitlines() if line and not line.startswith(("Usage:", "Try "))]
    assert len(lines) == 1, result.stderr
    return lines[0]


@pytest.mark.slow
def test_the_example_runs_as_it_stands(file: str) -> None:
    Path("cluster.py").write_text(answer("--example"))
    assert Path("cluster.py").read_text() == EXAMPLE
    shown = answer("cluster.py")
    for word in ("policy cost", "family=network", "family=forest", "gpu_large", "10800 simulated seconds"):
        assert word in shown


@pytest.mark.slow
def test_json_is_one_object_a_policy_and_nothing_else(file: str) -> None:
    lines = answer(file, "--json", *(f"--policy={policy}" for policy in POLICIES)).splitlines()
    found = [strictly(line) for line in lines]
    assert [each["policy"] for each in found] == list(POLICIES)
    for each in found:
        assert each["seconds"] == 300
        assert each["trials"] == sum(each["complete"].values()) + sum(each["failed"].values()) > 0
        assert set(each["utilisation"]) == {"gpu_large", "gpu_small", "cpu"}
        assert each["lost"] == 10
        complete = each["complete"]
        network, forest, flat = (complete[f"family={name}"] for name in ("network", "forest", "flat"))
        least = min(network / 2, forest, flat) * 4
        assert each["balanced_an_hour"] == pytest.approx(least * 12)


@pytest.mark.slow
def test_the_default_is_better_than_fifo_on_the_example(file: str) -> None:
    write(EXAMPLE, seconds=1800)
    found = [strictly(answer(file, "--json", "--policy", policy))["balanced_an_hour"] for policy in ("cost", "fifo")]
    assert found[0] > 1.2 * found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    "change",
    [
        ("else 0.02", "else 1"),
        ('(params["x"] - 0.3) ** 2', '1e15 * params["x"]'),
        ('"seconds": 10800', '"trials": 1'),
        ("generator.lognormal(-0.125, 0.5, count)", "generator.lognormal(-12.5, 5, count)"),
        ('"workers": 4', '"workers": 0'),
    ],
)
def test_json_holds_numbers_whatever_the_cluster(file: str, change: tuple[str, str]) -> None:
    assert change[0] in EXAMPLE
    strictly(answer(write(EXAMPLE.replace(*change), seconds=60), "--json"))


def test_a_table_compares_the_policies_that_are_named(file: str) -> None:
    shown = answer(file, "--policy", "fifo", "--policy", "paper")
    assert shown.index("policy fifo") < shown.index("policy paper")
    assert "policy cost" not in shown
    assert [line.split()[1] for line in shown.splitlines() if line.startswith(("│ fifo", "│ paper"))] == [
        "fifo",
        "paper",
    ]


def test_what_the_command_says_comes_before_what_the_file_says(file: str) -> None:
    found = strictly(
        answer(file, "--json", "--trials=300", "--seconds=9e4", "--seed=7", "--shares=promise", "--policy=fifo")
    )
    assert (found["trials"], found["seed"], found["shares"], found["policy"]) == (300, 7, "promise", "fifo")
    assert 300 < found["seconds"] < 9e4
    assert strictly(answer(file, "--json", "--seconds", "60.5"))["seconds"] == 60.5


def test_an_end_may_be_given_in_the_command_alone(file: str) -> None:
    write(EXAMPLE.replace('"seconds": 10800,', ""))
    assert "a simulation needs an end; give seconds or trials" in refused(file)
    assert strictly(answer(file, "--json", "--trials", "5"))["trials"] == 5


def test_the_trials_written_never_overlap_on_a_slot_and_lie_within_the_time(file: str) -> None:
    """Though workers die and others take their slots, and some trials are lost."""
    many = [{"at": 100 + 37 * turn, "class": "gpu_small", "workers": -5 if turn % 2 else 5} for turn in range(12)]
    write(EXAMPLE + f"\n\nCLUSTER['changes'] += {many}\n", seconds=600)
    found = strictly(answer(file, "--json", "--out", "trials.csv"))
    with Path("trials.csv").open(newline="", encoding="utf-8") as lines:
        rows = list(csv.DictReader(lines))
    assert tuple(rows[0]) == COLUMNS
    unseen = found["trials"] - len(rows)
    assert 0 <= unseen <= found["lost"] / MAX_LOST
    slots = defaultdict(list)
    for row in rows:
        start, end = float(row["start"]), float(row["end"])
        assert 0 <= start < end <= 600
        slots[row["class"], row["slot"]].append((start, end))
        assert row["state"] in {"COMPLETE", "FAILED"}
    assert {name for name, _ in slots} == {"gpu_large", "gpu_small", "cpu"}
    for spans in slots.values():
        spans.sort()
        assert all(before[1] <= after[0] for before, after in pairwise(spans))
    counts = Counter(row["subspace"] for row in rows if row["state"] == "COMPLETE")
    assert counts == found["complete"]


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (["--policy", "best"], "paper"),
        (["--shares", "fair"], "promise"),
        (["--seed", "-1"], "--seed"),
        (["--trials", "1" + "0" * 30], "trials: 1e+30 is not allowed"),
        (["--seconds", "inf"], "seconds"),
        (["--no-such-option"], "--no-such-option"),
        (["--out", "."], "--out"),
        (["--out", "t.csv", "--policy", "cost", "--policy", "fifo"], "--out"),
        (["--store", "no-url"], "no-url"),
    ],
)
def test_an_option_that_makes_no_sense_is_refused_by_name(file: str, words: list[str], about: str) -> None:
    assert about in refused(file, *words)


def test_without_a_file_the_command_says_what_is_missing() -> None:
    assert "CLUSTER_FILE" in refused()


def test_an_out_that_cannot_be_written_is_refused_before_anything_is_played(
    file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(simulation, "simulate", lambda *_, **__: pytest.fail("it was played"))
    assert "trials.csv cannot be written" in refused(file, "--out", "no/such/folder/trials.csv")
    assert "--out takes the name of a file" in refused(file, "--out", "-")


@pytest.mark.slow
def test_each_policy_is_kept_as_a_study_that_the_other_commands_find(file: str) -> None:
    words = (file, "--policy=cost", "--policy=fifo", "--store=sqlite:///kept.db")
    found = [strictly(line) for line in answer(*words, "--json").splitlines()]
    shown = answer(*words)
    for each in found:
        assert each["study"].startswith(f"simulated-cluster-{each['policy']}-")
        with closing(SqlStore("sqlite:///kept.db", read_only=True)) as store:
            counts = store.counts(store.find(each["study"]).key)
        assert counts[S.COMPLETE] == sum(each["complete"].values())
        assert counts[S.FAILED] == sum(each["failed"].values())
    assert shown.splitlines()[-1].startswith("kept as simulated-cluster-cost-")
    with closing(SqlStore("sqlite:///kept.db", read_only=True)) as store:
        assert len(store.records()) == 4, "a second simulation replaces nothing"


@pytest.mark.slow
def test_help_holds_every_option_the_example_file_and_commands_that_work(file: str) -> None:
    result = CliRunner().invoke(main, ["--help"], terminal_width=120)
    assert result.exit_code == 0
    for parameter in main.params:
        assert any(name in result.output for name in (*parameter.opts, "CLUSTER_FILE"))
    shown = [line.strip() for line in result.output.splitlines()]
    for line in EXAMPLE.splitlines():
        # Longer lines are broken.
        assert line.strip() in shown or len(line) > 116
    commands = [line for line in shown if line.startswith("python -m shadho_celery.simulate")]
    assert len(commands) == 6
    for each in commands:
        words = shlex.split(each.partition("#")[0].partition(">")[0].removeprefix("python -m shadho_celery.simulate"))
        assert answer(*words)
    assert Path("trials.csv").read_text().startswith("number,subspace,class,slot,start,end,state\n")


# Workers that end


def spot(notice: bool, **facts: Any) -> Simulation:
    classes = {"spot": {"workers": 8, "preemption_seconds": 100.0, "return_seconds": 10.0, "notice": notice}}
    families = {"net": Family(seconds={"spot": 60})}
    described = cluster(classes, families, factors=ALIKE, seconds=None, trials=100, **facts)
    return play(described, policy="fifo", speculate=False)


def test_a_trial_goes_on_from_the_moment_of_its_notice_or_from_its_last_checkpoint_or_begins_again() -> None:
    kept = spot(True, checkpoints="shared", checkpoint_seconds=0.0)
    lossy = spot(False, checkpoints="shared", checkpoint_seconds=30.0)
    anew = spot(True)
    work = [
        sum(
            each.ended_at - each.started_at
            for each in run.store.attempts()
            if each.started_at is not None and each.ended_at is not None
        )
        for run in (kept, anew)
    ]
    assert work[0] == pytest.approx(100 * 60)
    assert work[1] > 1.2 * work[0]
    assert kept.seconds < lossy.seconds
    assert kept.seconds < anew.seconds
    assert kept.interrupted > 20
    assert not kept.lost
    assert not sum(kept.failed.values())


def test_workers_of_limited_time_end_few_trials() -> None:
    classes = {"job": {"workers": 8, "for_seconds": 1000.0, "return_seconds": 0.0}}
    families = {"net": Family(seconds={"job": 60})}
    described = cluster(classes, families, factors=ALIKE, seconds=None, trials=400)
    found = play(described, policy="fifo", speculate=False)
    assert found.interrupted == 0
    assert found.trials == 400
    assert found.seconds < 1.1 * 400 * 60 / 8


def long_on_spot(**preempted: Any) -> float:
    """Return the share of the long trials that a class runs, which another class runs as fast."""
    classes = {"spot": {"workers": 8, "return_seconds": 10.0, **preempted}, "own": {"workers": 8}}
    families = {
        "long": Family(seconds={"spot": 1200, "own": 1200}),
        "short": Family(seconds={"spot": 60, "own": 60}, share=20.0),
    }
    described = cluster(classes, families, factors=ALIKE, seconds=None, trials=1000)
    placed = play(described, speculate=False).placed["family=long"]
    return placed["spot"] / sum(placed.values())


@pytest.mark.slow
def test_a_class_whose_machines_are_preempted_gets_fewer_long_trials_without_checkpoints() -> None:
    assert long_on_spot(preemption_seconds=1200.0) < 0.5 * long_on_spot(for_seconds=1e9)


# Reports


@pytest.mark.slow
def test_reports_keep_trials_off_a_class_that_is_hopeless_for_them() -> None:
    """Trials of one family take 100 times as long on a CPU. By their reports, that is known long before one ends."""
    families = {
        "quick": Family(seconds={"gpu": 60, "cpu": 90}),
        "slow": Family(seconds={"gpu": 60, "cpu": 6000}),
    }
    described = cluster({"gpu": 2, "cpu": 8}, families, seconds=3600.0)

    def completed(steps: int) -> float:
        runs = [play(with_fleet(described, steps=steps), seed=seed) for seed in range(4)]
        return sum(run.balanced_an_hour for run in runs)

    assert completed(20) > 1.1 * completed(0)


# Slots of one worker


#: two workers of four slots, and one of two
WIDE = {"big": {"workers": 2, "slots": 4}, "little": {"workers": 1, "slots": 2}}


def by_slots(params: Any, machine: Machine) -> float:
    return 60 / machine.slots if machine.compute_class == "big" else 90.0


def test_a_trial_takes_all_its_slots_of_one_worker_and_none_starves() -> None:
    families = {"net": Family(seconds=by_slots, params={"gpus": lambda label: hp.choice(label, [1, 2, 4])})}
    found = play(cluster(WIDE, families, seconds=1800.0), gpus=lambda values: values["params"]["gpus"])
    taken: Counter[str] = Counter()
    moments = []
    for trial in found.study.trials:
        if trial.outcome.seconds:
            moments += [(trial.started_at, trial.slots, trial.host), (trial.finished_at, -trial.slots, trial.host)]
    for _, slots, host in sorted(moments):
        taken[str(host)] += slots
        assert taken[str(host)] <= (4 if str(host).startswith("big") else 2)
    complete = Counter(trial.slots for trial in found.study.trials if trial.state is S.COMPLETE)
    assert min(complete[1], complete[2], complete[4]) > 10
    assert max(complete.values()) < 2 * min(complete.values()), complete
    assert {trial.slots for trial in found.study.trials if trial.compute_class == "little"} == {1, 2}


@pytest.mark.slow
def test_each_family_gets_the_number_of_slots_that_costs_least() -> None:
    """One gains nothing from more slots; the other takes eight times as long on one as on four."""
    families = {
        "small": Family(seconds={"big": 60.0}),
        "large": Family(seconds=lambda params, machine: 480 / machine.slots**1.5),
    }
    described = cluster({"big": {"workers": 2, "slots": 4}}, families, seconds=3 * 3600.0)
    trials = play(described, gpus=[1, 2, 4]).study.trials
    late = [t for t in trials if t.state is S.COMPLETE and (t.started_at or 0.0) > 7200.0]
    chosen = Counter((t.subspace, t.slots) for t in late)
    assert chosen["family=small", 1] > 0.9 * sum(t.subspace == "family=small" for t in late) > 10
    assert chosen["family=large", 4] > 0.9 * sum(t.subspace == "family=large" for t in late) > 10


def test_numbers_of_slots_are_searched_with_budgets_on_machines_that_are_preempted() -> None:
    stay = {"preemption_seconds": 1200.0, "return_seconds": 120.0}
    classes = {name: {**facts, **stay} for name, facts in WIDE.items()}
    described = cluster(classes, {"net": Family(seconds=by_slots)}, seconds=3600.0)
    found = play(described, gpus=[1, 2, 4], fidelity={"least": 1, "most": 9, "eta": 3})
    complete = [trial for trial in found.study.trials if trial.state is S.COMPLETE]
    assert {trial.budget for trial in complete} == {1.0, 3.0, 9.0}
    assert {trial.compute_class for trial in complete} == {"big", "little"}
