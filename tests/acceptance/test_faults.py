"""What happens to a study when single machines are broken or too small."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk, until
from acceptance.test_fleet import Fleet, _desk, make_fleet, on_rabbitmq, on_redis, vhost

# Fixtures, which pytest finds by their names here.
__all__ = ["_desk", "make_fleet", "on_rabbitmq", "on_redis", "vhost"]

pytestmark = pytest.mark.timeout(180)

STUDY = """
import os, time
from hyperopt import hp

SPACE = {{"x": hp.uniform("x", 0, 1)}}
STUDY = {{"classes": {classes}, "sampler": "random"}}

def objective(params, context):
    with open("runs.txt", "a") as file:
        file.write(f"{{context.trial}} {{context.compute_class}} {{os.environ.get('BROKEN', '')}}\\n")
    {body}
    return params["x"]
"""


def runs(desk: Desk) -> list[tuple[int, str, bool]]:
    lines = (desk.folder / "runs.txt").read_text().splitlines()
    return [(int(line.split()[0]), line.split()[1], len(line.split()) > 2) for line in lines]


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["rabbitmq", "redis"])
def test_a_worker_that_fails_what_others_finish_is_quarantined_and_its_trials_run_elsewhere(
    desk: Desk, broker: str, request: pytest.FixtureRequest
) -> None:
    """At most five of its failures; what fails everywhere is FAILED; the operator sees the machine and the error."""
    fleet: Fleet = request.getfixturevalue(f"on_{broker}")
    body = """
    if os.environ.get("BROKEN"):
        raise OSError("no space left on this machine")
    time.sleep(0.2)
    if params["x"] > 0.8:
        raise ValueError("x is too large")
    """
    desk.write("my_study.py", STUDY.format(classes=[fleet.cpu], body=body))
    desk.worker(fleet.cpu, "-c", "1", SHADHO_IMPORTS="my_study")
    bad = desk.worker(fleet.cpu, "-c", "2", SHADHO_IMPORTS="my_study", BROKEN="1")
    fleet.await_workers(2)
    command = desk.launch("my_study", "--trials", "30", "--seed", "1").wait()
    assert command.code == 0, desk.said()
    trials = desk.trials()
    assert len(trials) == 30
    for trial in trials:
        assert trial["state"] == ("FAILED" if trial["params"]["x"] > 0.8 else "COMPLETE"), trial["error"]
        assert trial["lost"] == 0
    assert sum(broken for _, _, broken in runs(desk)) <= 5
    told = [line for line in command.err.splitlines() if "is quarantined" in line]
    assert len(told) == 1, command.err
    assert fleet.cpu in told[0]
    assert "no space left on this machine" in told[0]
    until(lambda: "quarantined: this worker fails" in bad.err, 10, lambda: bad.err)
    assert bad.code is None, "it waits to be looked at"


def test_a_study_whose_first_trials_fail_alike_stops_and_nobody_is_quarantined(desk: Desk, on_redis: Fleet) -> None:
    desk.write("my_study.py", STUDY.format(classes=[on_redis.cpu], body="raise KeyError('loss')"))
    for _ in range(2):
        desk.worker(on_redis.cpu, "-c", "1", SHADHO_IMPORTS="my_study")
    on_redis.await_workers(2)
    command = desk.launch("my_study", "--study", "s", "--trials", "3000", "--seed", "1").wait()
    assert command.code == 1
    # Trials that take no time fail by the dozen until the scheduler knows; on a busy machine, by the hundred.
    assert desk.states()["FAILED"] < 1000
    line = 1 + (desk.folder / "my_study.py").read_text().splitlines().index("    raise KeyError('loss')")
    said = f"stopped: the first 10 trials have all failed with KeyError: 'loss' (my_study.py:{line})"
    assert said in command.err, command.err
    assert "quarantined" not in command.err
    assert f"KeyError: 'loss' (my_study.py:{line}); the first is trial 0" in command.out
    assert "shadho-celery trials s --failed" in command.out


def test_a_trial_that_runs_out_of_memory_runs_on_the_larger_class(desk: Desk, on_redis: Fleet) -> None:
    body = f"""
    if params["x"] > 0.5 and context.compute_class != "{on_redis.large}":
        raise MemoryError("unable to allocate")
    time.sleep(0.05)
    """
    desk.write("my_study.py", STUDY.format(classes=[on_redis.large, on_redis.cpu], body=body))
    for name in (on_redis.large, on_redis.cpu):
        desk.worker(name, "-c", "1", SHADHO_IMPORTS="my_study")
    on_redis.await_workers(2)
    command = desk.launch("my_study", "--trials", "30", "--seed", "2").wait()
    assert command.code == 0, desk.said()
    trials = desk.trials()
    assert {trial["state"] for trial in trials} == {"COMPLETE"}
    for trial in trials:
        assert trial["params"]["x"] <= 0.5 or trial["compute_class"] == on_redis.large
        assert trial["outgrown"] in {None, on_redis.cpu}
    assert any(trial["outgrown"] for trial in trials)
