"""Workers on a machine with unlike GPUs: real processes, and a stand-in for the driver."""

from __future__ import annotations

import os
import signal
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as make_desk
from acceptance.fake_gpus import fake_gpus

pytestmark = pytest.mark.timeout(120)

#: first lines of each study
BEGIN = """
import os, time
from hyperopt import hp

STUDY = {"sampler": "random"}
"""

STUDY = """
SPACE = {"x": hp.uniform("x", 0, 1)}

def objective(params, context):
    with open("cards.log", "a") as log:
        log.write(f"{context.compute_class} {os.environ['CUDA_VISIBLE_DEVICES']}\\n")
    time.sleep(0.3)
    return params["x"]
"""


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    """A desk that is cleared before the Redis of its workers is."""
    with make_desk(tmp_path) as made:
        made.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
        del made.environment["CUDA_VISIBLE_DEVICES"]
        made.write("cards.py", BEGIN + STUDY)
        yield made


def start(desk: Desk, gpus: str, *words: str, **environment: str) -> Command:
    command = (sys.executable, "-m", "shadho_celery.worker", "--import", "cards", *words)
    return desk.start(*command, **fake_gpus(desk.folder, gpus), **environment)


def workers(desk: Desk) -> dict[str, list[str]]:
    """The GPUs of each live worker, by class."""
    found: dict[str, list[str]] = defaultdict(list)
    for worker in desk.told("status", "--json").json()["workers"]:
        found[worker["class"]] += [f"{gpu['id']} {gpu['name']}" for gpu in worker["gpus"]]
    return dict(found)


def test_a_machine_with_unlike_gpus_is_a_worker_for_each_kind_by_one_command(desk: Desk) -> None:
    machine = start(desk, "A100:80,T4:15,A100:80")
    machine.says("serving class gpu_large and gpu_small")
    assert "2 x A100 (80 GiB), 1 x T4 (15 GiB)" in machine.err
    expected = {"gpu_large": ["0 A100", "2 A100"], "gpu_small": ["1 T4"]}
    until(lambda: workers(desk) == expected, 40, desk.said)
    assert "2 x A100 (80 GiB)" in desk.told("status").out
    # Another worker, that claims one of the GPUs by its UUID.
    second = start(desk, "A100:80,T4:15,A100:80", CUDA_VISIBLE_DEVICES="GPU-1")
    second.says("GPU 1 is also used by worker gpu_small@")
    second.send(signal.SIGTERM)
    assert second.wait().code == 0
    command = desk.launch("cards", "--trials", "12", "--json").wait(60)
    assert command.code == 0, desk.said()
    lines = {*(desk.folder / "cards.log").read_text().splitlines()}
    assert lines == {"gpu_large 0", "gpu_large 2", "gpu_small 1"}
    machine.interrupt()
    assert machine.wait().code == 0, desk.said()
    assert workers(desk) == {}


def test_an_embedded_run_has_a_class_for_each_kind(desk: Desk) -> None:
    for name in ("CELERY_BROKER_URL", "SHADHO_REDIS_URL"):
        del desk.environment[name]
    desk.environment |= fake_gpus(desk.folder, "A100:80,T4:15,A100:80") | {"SHADHO_CORES": "4"}
    command = desk.launch("cards", "--trials", "30", "--json").wait(60)
    assert command.code == 0, desk.said()
    lines = {*(desk.folder / "cards.log").read_text().splitlines()}
    assert lines - {"cpu "} == {"gpu_large 0", "gpu_large 2", "gpu_small 1"}


def test_workers_of_a_machine_end_together(desk: Desk) -> None:
    machine = start(desk, "A100:80,T4:15")
    until(lambda: len(workers(desk)) == 2, 40, desk.said)
    [small] = [each["name"] for each in desk.told("status", "--json").json()["workers"] if each["class"] == "gpu_small"]
    os.kill(int(small.split(".")[-2]), signal.SIGKILL)
    assert machine.wait().code == 128 + signal.SIGKILL
    machine.says("a worker of this machine has ended with exit code 137, so the others end too")
    another = start(desk, "A100:80,T4:15")
    until(lambda: len(desk.pids("shadho_celery.worker", "--class")) == 2, 40, desk.said)
    another.send(signal.SIGKILL)
    until(lambda: not desk.pids("shadho_celery.worker", "--class"), 40, desk.said)


def test_slots_of_one_worker_are_refused_for_several(desk: Desk) -> None:
    refused = start(desk, "A100:80,T4:15", "--slots", "3").wait()
    assert refused.code == 2
    assert "--slots is for one worker" in refused.err
    gone = start(desk, "A100:80,T4:15", "--class", "cpu", "--slots", "1", CUDA_VISIBLE_DEVICES="GPU-7")
    gone.says("no GPU (CUDA_VISIBLE_DEVICES is 'GPU-7', and the driver shows no such GPU); serving class cpu")


#: Trials that take 1 to 6 GiB of the GPU, by what they say, and note when they begin and end. Those above 3 GiB run out
#: of memory in their first attempt if another one is there.
SHARING = """
SPACE = {"gib": hp.uniform("gib", 1, 6)}

def note(context, gib):
    with open("cards.log", "a") as log:
        log.write(f"{os.environ['CUDA_VISIBLE_DEVICES']} {context.attempt} {gib}\\n")

def are_others():
    lines = [line.split() for line in open("cards.log")]
    here = [float(gib) > 0 for card, _, gib in lines if card == os.environ["CUDA_VISIBLE_DEVICES"]]
    return 2 * sum(here) - len(here) > 1

def objective(params, context):
    note(context, params["gib"])
    # Stands for what torch measures.
    context.on_ranks(0, int(params["gib"] * 2**30))
    time.sleep(0.5)
    is_full = params["gib"] > 3 and context.attempt == 1 and are_others()
    note(context, -params["gib"])
    if is_full:
        raise RuntimeError("CUDA out of memory")
    return params["gib"]
"""


def test_trials_share_a_gpu_as_far_as_their_measured_memory_fits(desk: Desk) -> None:
    """Two studies share the worker. A trial that runs out of memory beside others is repeated alone."""
    desk.write("cards.py", BEGIN + SHARING)
    worker = start(desk, "T4:16,T4:16", "--slots-per-gpu", "auto", "--slots", "8", "--class", "gpu")
    until(lambda: "gpu" in workers(desk), 40, desk.said)
    studies = [desk.launch("cards", "--trials", "30", "--seed", "3", "--json", "--study", name) for name in "ab"]
    assert [study.wait(90).code for study in studies] == [0, 0], desk.said()
    running: dict[str, list[tuple[int, float]]] = defaultdict(list)
    most = 0
    for line in (desk.folder / "cards.log").read_text().splitlines():
        card, attempt, gib = line.split()
        here = running[card]
        if float(gib) < 0:
            here.remove((int(attempt), -float(gib)))
            continue
        here.append((int(attempt), float(gib)))
        most = max(most, len(here))
        assert sum(gib for _, gib in here) <= 16
        assert len(here) == 1 or {attempt for attempt, _ in here} == {1}, "a second attempt is alone"
    assert set(running) == {"0", "1"}
    assert most >= 2
    trials = desk.trials()
    assert {(trial["state"], trial["outgrown"]) for trial in trials} == {("COMPLETE", None)}, desk.said()
    assert {trial["attempt"] for trial in trials} == {1, 2}
    assert "it is repeated alone" in worker.err
