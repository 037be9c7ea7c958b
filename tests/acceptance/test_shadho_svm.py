"""SHADHO's experiment: the record as an oracle of seconds and losses, and what the benchmark tells of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import services
from acceptance.commands import ROOT, Desk
from benchmarks.svm_record import CLASSES, KERNELS, Record, Row, read

from shadho_celery.core.trial import Attempt, TrialState

pytestmark = pytest.mark.timeout(240)

SCRIPT = ROOT / "tests" / "benchmarks" / "shadho_svm.py"
COLUMNS = "run,kernel,C,gamma,coef0,degree,class_cores,queue_s,run_s,train_s,loss,accuracy"


def row(kernel: str, cores: int, seconds: float, loss: float = 1.0, **params: float) -> Row:
    """A run whose params are in the middle, but for those that are given."""
    middle = {"C": 0.0, "gamma": -1.0, "coef0": -500.0, "degree": 5.0} | params
    labels = {"linear": 1, "rbf": 2, "sigmoid": 3, "poly": 4}[kernel]
    drawn: dict[str, Any] = {f"{kernel}_{label}": value for label, value in list(middle.items())[:labels]}
    return Row("A", kernel, cores, {"kernel": KERNELS.index(kernel), **drawn}, seconds, loss)


def everywhere(seconds: float = 100.0) -> list[Row]:
    """A run of each kernel on each class."""
    return [row(kernel, cores, seconds) for kernel in KERNELS for cores in CLASSES.values()]


def attempt(one: Row) -> Attempt:
    return Attempt(number=0, attempt=1, subspace=f"kernel={one.kernel}", params=one.params)


@pytest.mark.sample
def test_a_trial_has_the_loss_of_the_nearest_run_of_its_kernel() -> None:
    runs = [row("rbf", 16, 100, 2.0, C=-5), row("rbf", 16, 100, 3.0, C=10), row("linear", 16, 100, 4.0, C=9)]
    record = Record([*runs, *everywhere()])
    assert record.play(attempt(row("rbf", 4, 0, C=9)), "cores16").loss == 3.0
    assert record.play(attempt(row("rbf", 4, 0, C=-4)), "cores16").loss == 2.0


@pytest.mark.sample
def test_the_distance_counts_each_param_by_its_range() -> None:
    """A thousand apart in coef0 is as much as three in the exponent of gamma."""
    runs = [row("sigmoid", 16, 100, 2.0, coef0=-490, gamma=-3), row("sigmoid", 16, 100, 3.0, coef0=-300, gamma=-1)]
    record = Record([*runs, *(each for each in everywhere() if each.kernel != "sigmoid")])
    assert record.nearest("kernel=sigmoid", row("sigmoid", 4, 0).params).loss == 3.0


@pytest.mark.sample
def test_seconds_are_scaled_by_the_kernels_medians_on_the_two_classes() -> None:
    """A run of 300 s, three times the median of its kernel on its class, is three times the median of any class."""
    fast = [row("poly", 16, seconds) for seconds in (20, 50, 50)]
    slow = [row("poly", 2, 100), row("poly", 2, 100), row("poly", 2, 300, degree=14)]
    others = [each for each in everywhere() if (each.kernel, each.cores) != ("poly", 16)]
    outcome = Record([*fast, *slow, *others]).play(attempt(row("poly", 4, 0, degree=14)), "cores16")
    assert outcome.state is TrialState.COMPLETE
    assert outcome.seconds == pytest.approx(150)


def write(path: Path, *lines: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write("\n".join([COLUMNS, *lines]))
    return path


@pytest.mark.sample
def test_a_record_is_read_as_the_space_draws_its_params(tmp_path: Path) -> None:
    lines = [f"A,{k},4,0.01,-7,3,{c},0,60,50,1.5,0.9" for k in KERNELS for c in CLASSES.values()]
    rows = read(write(tmp_path / "trace.csv.gz", *lines))
    assert len(rows) == 12
    poly = rows[-1]
    assert (poly.run, poly.kernel, poly.cores, poly.seconds, poly.loss) == ("A", "poly", 4, 60, 1.5)
    assert poly.params == {"kernel": 3, "poly_C": 2, "poly_gamma": -2, "poly_coef0": -7, "poly_degree": 3}


@pytest.mark.sample
@pytest.mark.parametrize("text", ["not zipped", None])
def test_a_file_that_is_no_record_is_named(tmp_path: Path, text: str | None) -> None:
    path = tmp_path / "trace.csv.gz"
    if text:
        path.write_text(text)
    with pytest.raises(ValueError, match=r"trace.csv.gz is no record of SHADHO's SVM runs"):
        read(path)


@pytest.mark.sample
def test_a_record_without_a_needed_class_is_refused(tmp_path: Path) -> None:
    lines = [f"A,{k},4,0.01,-7,3,4,0,60,50,1.5,0.9" for k in KERNELS]
    with pytest.raises(ValueError, match="no run of linear on 8 cores"):
        read(write(tmp_path / "trace.csv.gz", *lines))


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220 * services.PATIENCE, check=False
    )


@pytest.fixture(name="played", scope="module")
def _played(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The last line for a record in which every run takes ten minutes, and only rbf's have good losses."""
    folder = tmp_path_factory.mktemp("record")
    lines = [
        f"{name},{kernel},{2.0**power},0.03,-500,5,{cores},0,600,50,{(1 if kernel == 'rbf' else 3) - power / 20},0.9"
        for name in "AB"
        for kernel in KERNELS
        for cores in CLASSES.values()
        for power in range(-5, 11)
    ]
    trace = write(folder / "trace.csv.gz", *lines)
    done = run(str(trace), *["--seeds", "1", "--hours", "1.75", "--workers", "5", "--jobs", "1"])
    assert done.returncode == 0, done.stderr
    assert "1.73 as published (466 and 269), 1.00 here" in done.stdout
    assert "in the 6 searches:\n  1.0 6 times" in done.stdout
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


@pytest.mark.parametrize("scheduler", ["Hyperopt", "fifo", "paper", "cost", "cost, promise", "cost, promise, tpe"])
def test_where_all_models_take_ten_minutes_fifteen_workers_train_150_in_105_minutes(
    played: dict[str, Any], scheduler: str
) -> None:
    """Whatever the mix; an even mix has no more, and the first good loss is there after the first ten minutes."""
    row = played["figures"]["schedulers"][scheduler]
    assert row["own mix"] == pytest.approx([150 / 1.75] * 3)
    assert row["even mix"][2] <= 150 / 1.75
    # Seconds of models that are still trained at the end count, too: many of one kernel make that one dearer.
    assert row["even weights"] == pytest.approx(row["own mix"], rel=0.06), "no kernel takes longer than another"
    assert row["hours to 1.0"][0] == pytest.approx(1 / 6, abs=1e-3)
    assert sum(played["figures"]["mix"][scheduler].values()) == pytest.approx(1)


def test_first_come_first_served_has_an_even_mix_and_searches_that_look_at_losses_have_not(
    played: dict[str, Any],
) -> None:
    mix = played["figures"]["mix"]
    assert mix["fifo"] == pytest.approx(dict.fromkeys(KERNELS, 0.25), abs=0.01)
    assert mix["cost"] == pytest.approx(mix["fifo"], abs=0.05)
    assert mix["Hyperopt"]["rbf"] > 0.3
    assert mix["cost, promise"]["rbf"] > 0.3
    parts = played["figures"]["paper_beside_hyperopt"]
    assert parts["by mix"] == pytest.approx(1, abs=0.02), "no kernel is cheaper"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (("absent.csv.gz",), "absent.csv.gz is no record"),
        (("absent.csv.gz", "--seeds", "0"), "--seeds: 0 is not a number above 0"),
        (("absent.csv.gz", "--hours", "nan"), "--hours: nan is not a number above 0"),
    ],
)
def test_bad_input_ends_with_two_and_one_line(desk: Desk, words: tuple[str, ...], told: str) -> None:
    done = desk.ran(SCRIPT, *words)
    assert done.code == 2
    assert told in done.err.splitlines()[-1]


def test_a_search_too_short_to_compare_is_refused(desk: Desk) -> None:
    lines = [
        f"{name},{k},4,0.01,-7,3,{c},0,7200,50,1.5,0.9" for name in "AB" for k in KERNELS for c in CLASSES.values()
    ]
    trace = write(desk.folder / "trace.csv.gz", *lines)
    done = run(str(trace), "--seeds", "1", "--hours", "1", "--workers", "2", "--jobs", "1")
    assert done.returncode == 2
    assert "give more --hours" in done.stderr.splitlines()[-1]
    assert "Traceback" not in done.stderr
