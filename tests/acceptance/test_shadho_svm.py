"""SHADHO's experiment: the record as an oracle of seconds and losses, and what the benchmark tells of it."""

from __future__ import annotations

import gzip
import json
import subprocess
import sys
from pathlib import Path

import pytest
import services
from acceptance.commands import ROOT, Desk
from benchmarks.svm_record import CLASSES, KERNELS

pytestmark = pytest.mark.timeout(240)

SCRIPT = ROOT / "tests" / "benchmarks" / "shadho_svm.py"
COLUMNS = "run,kernel,C,gamma,coef0,degree,class_cores,queue_s,run_s,train_s,loss,accuracy"


def write(path: Path, *lines: str) -> Path:
    with gzip.open(path, "wt") as file:
        file.write("\n".join([COLUMNS, *lines]))
    return path


def run(*words: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, str(SCRIPT), *words]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=220 * services.PATIENCE, check=False
    )


def test_where_all_models_take_ten_minutes_fifteen_workers_train_150_in_105_minutes(tmp_path: Path) -> None:
    """Whatever the mix; an even mix has no more, and the first good loss is there after the first ten minutes.

    Only models of rbf have good losses. The mix of first come, first served is even; those of searches that look at
    losses are not.
    """
    lines = [
        f"{name},{kernel},{2.0**power},0.03,-500,5,{cores},0,600,50,{(1 if kernel == 'rbf' else 3) - power / 20},0.9"
        for name in "AB"
        for kernel in KERNELS
        for cores in CLASSES.values()
        for power in range(-5, 11)
    ]
    trace = write(tmp_path / "trace.csv.gz", *lines)
    done = run(str(trace), *["--seeds", "1", "--hours", "1.75", "--workers", "5", "--jobs", "1"])
    assert done.returncode == 0, done.stderr
    assert "1.73 as published (466 and 269), 1.00 here" in done.stdout
    assert "in the 6 searches:\n  1.0 6 times" in done.stdout
    played = json.loads(done.stdout.splitlines()[-1])
    mix = played["figures"]["mix"]
    for scheduler in ("Hyperopt", "fifo", "paper", "cost", "cost, promise", "cost, promise, tpe"):
        row = played["figures"]["schedulers"][scheduler]
        assert row["own mix"] == pytest.approx([150 / 1.75] * 3)
        assert row["even mix"][2] <= 150 / 1.75
        # Seconds of models that are still trained at the end count, too: many of one kernel make that one dearer.
        assert row["even weights"] == pytest.approx(row["own mix"], rel=0.06), "no kernel takes longer than another"
        assert row["hours to 1.0"][0] == pytest.approx(1 / 6, abs=1e-3)
        assert sum(mix[scheduler].values()) == pytest.approx(1)
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
