"""The first hour: a look before a search, bounds between params, one trial at a time, and trials that run again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from acceptance.commands import Desk, until
from services.documents import text_of

pytestmark = pytest.mark.timeout(180)

#: A study whose trials of one kind fail until it is fixed.
STUDY = """
import random
from hyperopt import hp

SPACE = {"low": hp.uniform("low", 0, 1), "high": hp.uniform("high", 0, 1), "kind": hp.choice("kind", ["a", "b"])}
STUDY = {"trials": 8, "sampler": "random", "where": lambda p: p["low"] < p["high"], "max_failures": 0}

def objective(params, context):
    print("kind", params["kind"], "in", context.checkpoint_dir)
    if params["kind"] == "b":
        raise ValueError("no b yet")
    return {"loss": params["high"] - params["low"], "draw": random.random()}
"""
FIXED = STUDY.replace("raise ValueError", "print")
WORDS = ("my_study", "--study", "s", "--seed", "0", "--workers", "cpu=2")


def example() -> str:
    text = text_of("objective")
    return next(part.split("```")[0] for part in text.split("```python\n")[1:] if '"where"' in part.split("```")[0])


def refused(desk: Desk, *words: str) -> str:
    answer = desk.told(*words)
    assert answer.code == 2, answer.out
    assert "Traceback" not in answer.err
    return answer.messages[-1]


def test_the_study_of_the_objectives_readme_obeys_its_bounds_with_two_trials_at_a_time(desk: Desk) -> None:
    desk.write("my_study.py", example())
    command = desk.launch("my_study", "--workers", "cpu=3", "--seed", "0").wait()
    assert command.code == 0, desk.said()
    trials = desk.trials()
    assert len(trials) == 20
    assert all(trial["params"]["warm_up"] < trial["params"]["steps"] / 2 for trial in trials)
    times = [
        (trial["started_at"], trial["finished_at"])
        for trial in desk.told("trials", "my_study", "--json").json()["trials"]
    ]
    assert max(sum(began <= at < ended for began, ended in times) for at, _ in times) <= 2


def test_a_dry_run_shows_what_trials_would_get_and_leaves_nothing(desk: Desk) -> None:
    desk.write("my_study.py", STUDY + "print('imported')\n")
    desk.write("points.jsonl", json.dumps({"low": 0.25, "high": 0.75, "kind": "a"}))
    found = desk.told("run", "my_study", "--dry-run", "3", "--enqueue", "points.jsonl", "--seed", "1")
    assert found.code == 0, found.err
    first, *others = map(json.loads, found.out.splitlines())
    assert first == {"low": 0.25, "high": 0.75, "kind": "a"}
    assert len(others) == 2
    assert all(each["low"] < each["high"] for each in others)
    again = desk.told("run", "my_study", "--dry-run", "3", "--enqueue", "points.jsonl", "--seed", "1", "--json").json()
    assert again == {"study_file": "my_study", "values": [first, *others]}
    assert {path.name for path in desk.folder.iterdir()} <= {"my_study.py", "points.jsonl", "__pycache__"}
    assert "leave out --resume and --warm-start" in refused(desk, "run", "my_study", "--dry-run", "3", "--resume")
    assert "is for --resume" in refused(desk, "run", "my_study", "--retry-failed")


def test_a_trial_runs_again_here_as_it_ran_there(desk: Desk) -> None:
    """Its values, its seed, its output and its loss are the same, and nothing is recorded."""
    desk.write("my_study.py", STUDY)
    assert desk.launch(*WORDS).wait().code == 0, desk.said()
    trials = desk.told("trials", "s", "--json").json()["trials"]
    well, failed = (next(trial for trial in trials if trial["state"] == state) for state in ("COMPLETE", "FAILED"))
    before = desk.trials()
    found = desk.told("again", "s", str(well["number"]))
    assert found.code == 0, found.err
    assert found.out.startswith("kind a in ")
    loss, draw = well["loss"], well["metrics"]["draw"]
    assert f"trial {well['number']}: loss {loss!r}, {loss!r} on record\n  draw: {draw!r}\n" in found.out
    assert found.err == ""
    command = desk.start("shadho-celery", "again", "s", str(failed["number"])).wait()
    assert command.code == 1
    assert "kind b in " in command.out
    assert command.err.rstrip().endswith("ValueError: no b yet")
    desk.write("my_study.py", FIXED)
    fixed = desk.told("again", "s", str(failed["number"]))
    assert fixed.code == 0
    assert f"; trial {failed['number']} ran under version {failed['code']}" in fixed.err
    assert "no loss on record" in fixed.out
    assert desk.trials() == before
    assert "has no trial 99" in refused(desk, "again", "s", "99")
    desk.write("my_study.py", FIXED.replace('hp.uniform("low", 0, 1)', 'hp.uniform("low", 2, 3)'))
    assert "does not fit the SPACE that my_study has now" in refused(desk, "again", "s", "0")
    (desk.folder / "my_study.py").unlink()
    assert "there is no module my_study here" in refused(desk, "again", "s", "0")


def test_a_command_runs_again_in_a_folder_that_nobody_else_has(desk: Desk) -> None:
    script = 'echo "{\\"loss\\": $0}"; echo "$SHADHO_PARAMS" >> places'
    desk.write(
        "study.py",
        f"""
from hyperopt import hp

SPACE = {{"x": hp.uniform("x", 0, 1)}}
STUDY = {{"command": ["sh", "-c", {script.replace("{", "{{", 1)!r}, "{{x}}"], "trials": 1}}
""",
    )
    assert desk.launch("study", "--study", "s", "--workers", "cpu=1").wait().code == 0, desk.said()
    told = desk.told("again", "s", "0")
    assert told.code == 0, told.err
    first, again = map(Path, (desk.folder / "places").read_text().split())
    assert first.is_relative_to(desk.folder)
    assert not again.is_relative_to(desk.folder)
    assert not again.parent.exists(), "its own temporary folder, with all that was in it"


def test_failed_trials_run_again_in_the_next_run_or_at_a_resume(desk: Desk) -> None:
    desk.write("my_study.py", STUDY)
    assert desk.launch(*WORDS).wait().code == 0, desk.said()
    numbers = [trial["number"] for trial in desk.told("trials", "s", "--failed", "--json").json()["trials"]]
    well = next(number for number in range(8) if number not in numbers)
    desk.write("my_study.py", FIXED)
    assert f"trial {well} has not failed: it is complete" in refused(desk, "enqueue", "s", "--failed", str(well))
    assert "'x' is not the number of a trial" in refused(desk, "enqueue", "s", "--failed", "x")
    assert "give one FILE of known points, or --failed" in refused(desk, "enqueue", "s")
    told = desk.told("enqueue", "s", "--failed", str(numbers[0]))
    assert told.out == "enqueued trial 8 for the next run: shadho-celery run my_study --resume s --trials 9\n", told.err
    command = desk.start("shadho-celery", "resume", "s", "--retry-failed", "--workers", "cpu=2").wait()
    assert command.code == 0, desk.said()
    # Trial 8 has the params of the first one.
    assert f"running the params of trials {', '.join(map(str, numbers[1:]))} again" in command.err
    assert desk.states() == {"FAILED": len(numbers), "COMPLETE": 8}
    assert f"8 complete, {len(numbers)} failed of {8 + len(numbers)} trials" in command.out
    assert "no failed trial, or all of them were tried again" in refused(desk, "enqueue", "s", "--failed")
    more = desk.told("resume", "s", "--retry-failed", "--workers", "cpu=2")
    assert "no failed trial is left to run again" in more.err
    desk.nothing_left()


def test_a_running_study_gets_its_failed_trials_again_and_another_number_at_a_time(desk: Desk) -> None:
    desk.study(seconds=0.2, body="assert context.trial > 1", settings={"at_once": 1, "max_failures": 0})
    command = desk.launch("my_study", "--trials", "1000", "--workers", "cpu=3", "--study", "mine")
    desk.await_runs(4)
    told = desk.told("enqueue", "mine", "--failed", "--json").json()
    assert told["is_done"], desk.said()
    assert told["text"].startswith("enqueued trials ")
    assert desk.told("set", "mine", "--at-once", "3").out == "set at_once 3\n"
    until(lambda: len(desk.runs()) - len(desk.runs("ended")) > 3, 30, desk.said)
    desk.told("stop", "mine")
    assert command.wait(30).code == 0, desk.said()
    params = [trial["params"] for trial in desk.trials()]
    assert all(params.count(each) == 2 for each in params[:2])
    desk.nothing_left()


def test_bounds_that_fail_while_a_study_runs_end_it_with_the_point(desk: Desk) -> None:
    """They worked for the draws at the start."""
    where = "where = lambda p, calls=[]: calls.append(p) or len(calls) < 150 or p['none']"
    desk.write("my_study.py", f"{where}\n{STUDY}".replace('lambda p: p["low"] < p["high"]', "where"))
    command = desk.launch(*WORDS, "--trials", "500").wait()
    assert command.code == 2, desk.said()
    assert "Error: where failed for {'high': " in command.err
    assert "KeyError: 'none' (my_study.py:1)" in command.err
    assert "Traceback" not in command.err
    desk.nothing_left()
