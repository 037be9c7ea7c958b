"""Commands of the documents that search for long, measure or draw: each does what its document says of it."""

from __future__ import annotations

import json
import re
import sys
from typing import Any

import pytest
from acceptance.commands import ROOT, Desk
from acceptance.documents import COMMANDS, in_tests, shell, shortened

pytestmark = [pytest.mark.timeout(480), pytest.mark.slow]


def test_the_placement_benchmark(desk: Desk) -> None:
    """It runs on the data of the checkout, here for one fleet, and draws its three pictures.

    The documents have two commands; the longer one is the shorter one and an option.
    """
    shorter, command = sorted((line for line in COMMANDS if "placement.py" in line), key=len)
    assert command.startswith(f"{shorter} --pictures")
    script = command.replace(".readme", str(desk.folder))
    out = shell(desk, in_tests(script, "--fleet 10/10/10 --hours 0.01 --seeds 1 --flat-seeds 1 --jobs 1"), seconds=450)
    assert len(json.loads(out.splitlines()[-1])["goals"]) >= 6
    assert (desk.folder / "gantt.png").read_bytes().startswith(b"\x89PNG")
    assert all("<svg" in (desk.folder / f"{name}.svg").read_text() for name in ("placement", "flat"))


#: best loss of the digits that the same search finds without a pruner, and three times the standard deviation of the
#: difference of two trainings of one good network
WHOLE, NOISE = 0.075, 0.03
#: trials of both searches: TPE learns after the first twenty
TRIALS = 27


def test_a_search_that_prunes(desk: Desk) -> None:
    """The pruned search comes to the loss of the same search without a pruner, in at most half of its epochs.

    Here the search has fewer trials.
    """
    command = next(line for line in COMMANDS if "tasks.mlp --pruner" in line)
    pruned = json.loads(shell(desk, f"{command} --seed 1 --trials {TRIALS} --json", seconds=450))
    epochs = [trial["step"] or 27 for trial in desk.trials()]
    assert pruned["trials"]["pruned"] > 10
    assert len(epochs) == TRIALS
    assert sum(epochs) <= 0.5 * TRIALS * 27
    assert pruned["best"]["loss"] <= WHOLE + NOISE


SMALL_UNET = """
from tasks import unet

unet.SETTINGS = unet.Settings(epochs=4, size=16, train=8, held_out=4)
SPACE, STUDY, objective, on_trial = unet.SPACE, unet.STUDY, unet.objective, unet.on_trial
"""


def test_unets_that_find_cells(desk: Desk) -> None:
    """The command compares with the standard, draws, and says where each depth went; here with smaller pictures."""
    desk.write("small_unet.py", SMALL_UNET)
    command = next(line for line in COMMANDS if "run tasks.unet" in line)
    out = shell(desk, f"{command.replace('tasks.unet', 'small_unet')} --demo --trials 9", seconds=450)
    assert " complete models beat the baseline (dice loss " in desk.commands[-1].err
    assert (desk.folder / "unet.png").read_bytes().startswith(b"\x89PNG")
    # On a busy machine it may be that no trial is pruned, which the title of the table then leaves out.
    table = out[out.index("complete x median time") :]
    assert all(f"network={depth},descent=" in table for depth in ("shallow", "medium", "deep"))
    trials = desk.trials()
    assert len(trials) == 9
    assert {trial["compute_class"] for trial in trials} == {"gpu_large", "gpu_small", "cpu"}


def test_the_fidelity_benchmark(desk: Desk) -> None:
    """It runs to its goals; here one seed of each part, one problem, and of the peers what is recorded."""
    command = next(line for line in COMMANDS if "fidelity.py" in line)
    options = "--only misleading --how asha --seeds 1 --straggling-seeds 1 --hours 0.02"
    script = shortened(desk, command, options, "script.AT, script.SLOTS, script.EACH = (3, 6, 12, 25), (25, 64), 2.0")
    out = shell(desk, script, seconds=450)
    assert len(json.loads(out.splitlines()[-1])["goals"]) == 10


def test_the_picture_of_the_dashboard(desk: Desk, browser: Any) -> None:
    """A study is simulated, and its page in the dashboard is drawn; here one of fewer trials."""
    command = next(line for line in COMMANDS if "picture.py" in line)
    script = in_tests(command.replace(".readme", str(desk.folder)), "--trials 9")
    shell(desk, f"cd {ROOT} && {script}", seconds=450)
    assert (desk.folder / "study.png").read_bytes().startswith(b"\x89PNG")


def test_the_overhead_benchmark(desk: Desk, redis_url: str) -> None:
    """The benchmark runs to its last line, one JSON object with figures and goals; here with as little as it takes."""
    command = next(line for line in COMMANDS if "overhead.py" in line)
    script = command.replace("tests/", f"{ROOT}/tests/").replace("python", sys.executable, 1)
    out = shell(desk, f"{script} --trials 40 --repeats 1 --broker redis --redis-url {redis_url}", seconds=450)
    last = json.loads(out.strip().splitlines()[-1])
    assert set(last) == {"figures", "goals"}
    assert set(last["goals"]) >= {"redis_study_vs_bare_threads", "redis_study_vs_optuna", "memory_mb_per_100k"}


#: makes each part of the benchmark of fleets short
SHORT_FLEETS = """
script.DAY, script.FOR_SECONDS, script.LIMITED_SECONDS = 4 * 3600.0, 3600, 3 * 3600
script.SPOT_TRIALS, script.MONEY_TRIALS = 300, 200
"""


def test_the_benchmark_of_fleets(desk: Desk) -> None:
    """Every part runs to its figures; here with one seed and short. Goals of means are not judged by one."""
    command = next(line for line in COMMANDS if "fleets_of_people.py" in line)
    out = shell(desk, shortened(desk, command, "--seeds 1 --days 1", SHORT_FLEETS), seconds=450)
    last = json.loads(out.splitlines()[-1])
    assert {*last["figures"]} >= {"width", "spot", "limited", "money"}
    assert last["goals"]["spot: failed"]["reached"]
    assert "limited: killed after the first workers" in last["goals"]


#: makes each part of the benchmark of gangs as short as can be
SHORT_GANGS = """
from dataclasses import replace
import backup_played
backup_played.TARGET = 0.7
script.STALE, script.STALE_RATES, script.STALE_STEPS = (1, 4), (0.05,), 40
script.BACKUPS, script.WORKERS, script.LEARNING_RATE = (0, 4), 12, 0.2
script.WIDE_RATES, script.WIDE_SECONDS = (0.8,), 8.0
script.SLOW_REPLICAS, script.SLOW_QUICK, script.AUTO_STEPS = 8, (1, 20), 120
script.REPLICAS = 2
for name in ("sync", "sync, 2 bits"):
    script.MODES[name] = replace(script.MODES[name], strategy=script.Sync(replicas=2), steps=20)
"""


def test_the_benchmark_of_gangs(desk: Desk) -> None:
    """Each part that a document names comes to its figures, and (a) to (c) draw their pictures.

    What is counted reaches its goal also in short: bytes and evaluations.
    """
    parts = dict.fromkeys(re.findall(r"--only (\w+)", " ".join(line for line in COMMANDS if "backup_sgd.py" in line)))
    assert parts.keys() == {"a", "b", "c", "slow", "auto", "modes", "adsaga", "drop"}
    command = " ".join(["python tests/benchmarks/backup_sgd.py", *(f"--only {part}" for part in parts)])
    script = shortened(desk, command, "--pictures pictures --quick --seeds 1 || true", SHORT_GANGS)
    told = json.loads(shell(desk, script, seconds=450).splitlines()[-1])
    assert told["figures"].keys() == {"settings", "versions", *parts}
    for part in parts:
        assert told["figures"][part]
        assert any(name.startswith(f"({part}) ") for name in told["goals"])
    counted = {name: row for name, row in told["goals"].items() if "bytes" in name or "evaluations" in name}
    assert counted
    assert all(row["reached"] for row in counted.values()), counted
    for picture in ("staleness", "backups", "against"):
        assert (desk.folder / "pictures" / f"{picture}.png").read_bytes().startswith(b"\x89PNG")
