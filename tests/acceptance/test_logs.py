"""What a trial says is kept, and read where it ran, from elsewhere, and while it runs."""

from __future__ import annotations

import re
import sys

import pytest
from acceptance.commands import Command, Desk, until, worker_elsewhere

pytestmark = pytest.mark.timeout(180)

STUDY = """
import logging, subprocess, sys, time, warnings
from pathlib import Path
from hyperopt import hp
from tqdm import tqdm

SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"classes": ["cpu"]}
log = logging.getLogger("my_study")

def objective(params, context):
    if context.trial == 0:
        return 0.0
    print(f"trial {context.trial} begins")
    log.info("x is %s", params["x"])
    warnings.warn("a strange x", stacklevel=1)
    for _ in tqdm(range(1000), desc="steps", mininterval=0):
        pass
    subprocess.run([sys.executable, "-c", "print('said by a child')"], check=True)
    if context.trial == 1:
        raise ValueError("on purpose")
    if context.trial == 2:
        while not Path("go").exists():
            time.sleep(0.05)
    print("it ends")
    return params["x"]
"""

#: what the log of a trial has, without time stamps
LINES = [
    r"trial \d begins",
    r"INFO my_study: x is 0\.\d+",
    r".*UserWarning: a strange x",
    r"  warnings\.warn\(.*",
    r"steps: 100%.*1000/1000.*",
    r"said by a child",
]


def logs(here: Desk, *words: str, **environment: str) -> Command:
    return here.start(sys.executable, "-m", "shadho_celery", "logs", *words, **environment)


def unstamped(text: str) -> list[str]:
    """The lines of a log; each has its time stamp."""
    lines = text.splitlines()
    assert all(re.match(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z ", line) for line in lines), text
    return [line.split(" ", 1)[1] for line in lines]


def has_all(text: str, *more: str) -> None:
    lines = unstamped(text)
    assert len(lines) == len(LINES) + len(more), text
    for line, pattern in zip(lines, [*LINES, *more], strict=True):
        assert re.fullmatch(pattern, line), (line, pattern)


@pytest.mark.sample
def test_the_output_of_embedded_trials(desk: Desk) -> None:
    """In one run: passed through, kept in one log a trial, told of, and in the store where a trial has failed."""
    desk.write("my_study.py", STUDY)
    desk.write("go", "")
    run = desk.launch("my_study", "--trials", "4", "--study", "s", "--workers", "cpu=1", "--show-output").wait(90)
    assert run.code == 0, desk.said()
    for number in (1, 3):
        shown = [line.removeprefix(f"[{number}] ") for line in run.err.splitlines() if line.startswith(f"[{number}]")]
        assert all(re.fullmatch(*pair) for pair in zip(LINES, shown, strict=False)), run.err
        assert len(shown) == len(LINES) + (number == 3)
    has_all(logs(desk, "s", "3").wait().out, "it ends")
    has_all(desk.told("logs", "s", "3", "--follow").out, "it ends")
    has_all(desk.told("logs", "s", "1").out)
    stored = {trial["number"]: trial["log"] for trial in desk.trials()}
    has_all(stored.pop(1))
    assert set(stored.values()) == {None}
    files = {path.name for path in desk.folder.glob(".shadho/checkpoints/*/logs/*")}
    assert files == {"1.1.log", "2.1.log", "3.1.log"}, "one file a trial, none without output"
    [first] = desk.folder.glob(".shadho/checkpoints/*/logs/3.1.log")
    first.with_suffix(".replica1.log").write_text("as a replica of a gang leaves it\n")
    named = desk.told("logs", "s", "3").err
    assert re.fullmatch(r"output of another replica or rank: \.shadho/\S+/logs/3\.1\.replica1\.log\n", named)
    silent = desk.told("logs", "s", "0")
    assert (silent.code, silent.out) == (0, "")
    assert silent.err == "trial 0 has printed nothing\n"
    for words, says in {
        ("s", "7"): "has no trial 7",
        ("s", "3", "--attempt", "2"): "trial 3 has 1 attempt;",
        ("other", "3"): "no study",
        ("s", "three"): "not a valid integer",
    }.items():
        refused = desk.told("logs", *words)
        assert refused.code == 2
        assert says in refused.err
        assert "Traceback" not in refused.err
    worker_log = (desk.states_folder() / "worker-cpu.log").read_text()
    lines = re.findall(r"study s, trial (\d)(?:, attempt 1)? \(all\): (.*)", worker_log)
    assert [number for number, _ in lines] == ["0", "1", "2", "3"]
    assert re.fullmatch(r"COMPLETE, loss 0, \S+ s", lines[0][1])
    assert re.fullmatch(r"failed, \S+ s: ValueError: on purpose", lines[1][1])
    assert "Task shadho.trial[" not in worker_log


def test_the_output_of_trials_on_a_fleet_is_read_from_its_workers(
    desk: Desk, tmp_path_factory: pytest.TempPathFactory, redis_url: str
) -> None:
    """Also while a trial runs, and signed; once the worker is gone, the last lines of one that failed are left."""
    folder = tmp_path_factory.mktemp("there")
    there, worker, urls, keyless = worker_elsewhere(desk, folder, STUDY, redis_url, "-c", "1", "-l", "INFO")
    run = desk.launch("my_study", "--trials", "3", "--study", "s", **urls)
    until(lambda: [*there.folder.glob(".shadho/checkpoints/*/logs/2.1.log")], 60, desk.said)
    followed = logs(desk, "s", "2", "--follow", **urls)
    until(lambda: "said by a child" in followed.out, 30, desk.said)
    has_all(followed.out)
    assert followed.code is None
    refused = desk.told("logs", "s", "2", **keyless)
    assert refused.code == 2
    assert "give the fleet's --signing-key-file" in refused.err
    there.write("go", "")
    run.wait()
    has_all(followed.wait().out, "it ends")
    has_all(desk.told("logs", "s", "2", **urls).out, "it ends")
    silent = desk.told("logs", "s", "0", **urls)
    assert silent.code == 0
    assert "trial 0 has printed nothing" in silent.err
    worker.interrupt()
    worker.wait()
    gone = desk.told("logs", "s", "2", **urls)
    assert gone.code == 2
    assert "no worker is live on" in gone.err
    failed = desk.told("logs", "s", "1", **urls)
    assert failed.code == 0
    assert "the last lines of its output were sent with its result" in failed.err
    has_all(failed.out)


def test_the_output_of_a_whole_fleet_is_not_shown_and_the_command_for_a_trial_is_named(desk: Desk) -> None:
    fleet = {"CELERY_BROKER_URL": "redis://127.0.0.1:1/0", "SHADHO_REDIS_URL": "redis://127.0.0.1:1/0"}
    refused = desk.told("run", "my_study", "--show-output", **fleet)
    assert refused.code == 2
    assert "shadho-celery logs STUDY TRIAL --follow" in refused.err
