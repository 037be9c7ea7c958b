"""A running study and its workers are steered by commands, on one machine and on a fleet."""

from __future__ import annotations

import stat
from collections.abc import Callable
from pathlib import Path

import pytest
from acceptance.commands import Desk, until
from integration.fleets import fleet

from shadho_celery.fleet.signing import KEY_FILE

pytestmark = pytest.mark.timeout(180)


def told(desk: Desk, *words: str, code: int = 0, **environment: str) -> str:
    """Return what a command prints; it must end with this code, and a refusal is one line."""
    answer = desk.told(*words, **environment)
    assert answer.code == code, (words, answer.out, answer.err, desk.said())
    if code:
        assert len(answer.err.splitlines()) == 1, answer.err
        assert "Traceback" not in answer.err
    return answer.err if code else answer.out


@pytest.mark.sample
def test_a_study_on_this_machine_is_paused_unpaused_and_stopped(desk: Desk) -> None:
    desk.study(seconds=0.5)
    command = desk.launch("my_study", "--trials", "1000", "--workers", "cpu=2", "--study", "mine")
    desk.await_runs(3)
    key = desk.states_folder() / "control.key"
    assert stat.S_IMODE(key.stat().st_mode) == 0o600
    assert told(desk, "pause", "mine").startswith("paused: ")
    until(lambda: len(desk.runs()) == len(desk.runs("ended")), 20, desk.said)
    begun = len(desk.runs())
    until(lambda: "│ mine  │ tester │ paused │" in told(desk, "status"), 20, desk.said)
    command.says("; paused")
    assert desk.told("show", "mine", "--json").json()["state"] == "paused"
    assert len(desk.runs()) == begun
    assert "no running study is called 'other'; running studies: mine" in told(desk, "stop", "other", code=2)
    assert "has ended: complete" in told(desk, "cancel", "mine", "0", code=2)
    assert told(desk, "unpause", "min") == "study mine: unpaused: trials start again\n"
    desk.await_runs(begun + 1)
    assert "running on" in told(desk, "show", "mine")
    answer = desk.told("stop", "mine", "--json").json()
    assert (answer["is_done"], answer["text"].partition(":")[0]) == (True, "stopping")
    assert command.wait(30).code == 0, desk.said()
    assert desk.states()["COMPLETE"] == len(desk.runs()) < 1000
    actions = desk.told("show", "mine", "--json").json()["actions"]
    assert [each["action"] for each in actions] == ["pause", "cancel", "unpause", "stop"]
    assert "stop, asked by " in command.out
    assert "study mine does not run" in told(desk, "stop", "mine", code=2)
    desk.nothing_left()


def test_a_running_study_gets_known_points_and_another_limit_and_its_worker_is_drained(desk: Desk) -> None:
    """The limit lasts: a run that resumes the study has the new one."""
    desk.study(seconds=0.2)
    desk.write("points.jsonl", '{"side": 0, "x": 0.125}\n{"side": 0, "x": 0.25}\n')
    words = ("my_study", "--trials", "1000", "--workers", "cpu=1,gpu=1", "--study", "mine")
    command = desk.launch(*words)
    until(lambda: {name for _, _, name, _ in desk.runs()} == {"cpu", "gpu"}, 60, desk.said)
    assert told(desk, "enqueue", "mine", "points.jsonl").startswith("enqueued trials ")
    assert "cannot be read" in told(desk, "enqueue", "mine", "none.jsonl", code=2)
    assert "no setting is given" in told(desk, "set", "mine", code=2)
    refused = told(desk, "drain", "cpu@elsewhere", code=2)
    [place] = [word.rstrip(",;") for word in refused.split() if word.startswith("cpu@") and "elsewhere" not in word]
    assert told(desk, "drain", place).startswith(f"drained {place}")
    begun = len([run for run in desk.runs() if run[2] == "cpu"])
    desk.await_runs(len(desk.runs()) + 5)
    assert len([run for run in desk.runs() if run[2] == "cpu"]) == begun
    told(desk, "undrain", place)
    until(lambda: len([run for run in desk.runs() if run[2] == "cpu"]) > begun, 30, desk.said)
    limit = len(desk.runs()) + 10
    assert told(desk, "set", "mine", "--trials", str(limit)) == f"set trials {limit}\n"
    assert command.wait(60).code == 0, desk.said()
    # One that was on its way to a slot may wait beyond the limit.
    assert desk.states()["COMPLETE"] == limit
    assert {*desk.states()} <= {"COMPLETE", "WAITING"}
    assert {0.125, 0.25} <= {trial["params"].get("x") for trial in desk.trials()}
    shown = desk.told("show", "mine", "--json").json()
    assert (shown["settings"]["trials"], shown["in_force"]["trials"]) == (limit, limit)
    assert [each["action"] for each in shown["actions"]] == ["enqueue", "drain", "undrain", "set"]
    assert "nothing is left to run" in desk.told("run", "my_study", "--resume", "mine", "--workers", "cpu=2").err


def test_a_study_on_a_signed_fleet_is_steered_by_whoever_has_the_key(
    tmp_path: Path, amqp_url: str, redis_url: str, unique: Callable[[str], str]
) -> None:
    """A running trial is cancelled, and a command without the key is refused."""
    key = tmp_path / "shadho.key"
    key.write_text("0123456789abcdef0123")
    key.chmod(0o600)
    with fleet(tmp_path / "fleet", amqp_url, redis_url, unique("cpu"), **{KEY_FILE: str(key)}) as made:
        desk = made.desk
        desk.study(seconds=0.2, body="time.sleep(3600 if context.trial == 2 else 0)")
        made.workers(1, slots=2)
        launched = made.launch("my_study", 8)
        until(lambda: 2 in [number for number, *_ in desk.runs()], 60, desk.said)
        found = told(desk, "stop", "my_study", code=2, **{KEY_FILE: ""})
        assert "obeys requests with another signing key" in found
        assert told(desk, "cancel", "my_study", "2") == "trial 2 is cancelled and stops\n"
        launched.wait(60)
        assert launched.code == 0, desk.said()
        assert desk.states() == {"COMPLETE": 8, "CANCELLED": 1}
