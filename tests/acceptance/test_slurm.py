"""SLURM as it is: a controller and a node of this machine run an array of workers, of which one is requeued."""

from __future__ import annotations

import getpass
import os
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from acceptance.commands import Desk, until
from acceptance.commands import desk as make_desk
from acceptance.test_fleet import Fleet
from acceptance.test_metrics import free_port

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

pytestmark = [pytest.mark.timeout(300), pytest.mark.slow]

PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel")

#: One node, without control groups, so that it runs in containers, too.
CONFIGURATION = """
ClusterName=test
SlurmctldHost={host}(127.0.0.1)
SlurmUser={user}
SlurmdUser={user}
SlurmctldPort={controller_port}
SlurmdPort={node_port}
AuthType=auth/munge
AuthInfo=socket={munge}
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU_Memory
DefMemPerCPU=500
SlurmdParameters=config_overrides
MpiDefault=none
MailProg=/bin/true
KillWait=20
NodeName={host} NodeAddr=127.0.0.1 CPUs=4 RealMemory=4000 State=UNKNOWN
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""

#: A trial of four seconds, which notes the task of the array that runs it, and how often that was requeued.
STUDY = """
import os, time
from hyperopt import hp

SPACE = hp.uniform("x", 0, 1)
STUDY = {"sampler": "random", "cores": 1}

def note(*words):
    task, restarts = os.environ["SLURM_ARRAY_TASK_ID"], os.environ.get("SLURM_RESTART_COUNT", "0")
    with open("log", "a") as log:
        log.write(" ".join(map(str, (*words, task, restarts))) + "\\n")

def objective(x, context):
    file = context.checkpoint_dir / "step"
    first = int(file.read_text()) if file.exists() else 0
    note("began", context.trial, context.attempt, first)
    for step in range(first, 40):
        time.sleep(0.1)
        context.report(step + 1, x)
        if context.should_stop():
            # In place: SLURM signals this process too, which leaves its end to the worker.
            file.write_text(str(step + 1))
            return None
    note("ended", context.trial, context.attempt)
    return x
"""


@pytest.fixture(name="desk")
def _desk(redis_url: str, no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    lacking = [name for name in PROGRAMS if _program(name) is None]
    if lacking:
        pytest.skip(f"{', '.join(lacking)} not installed (Debian: apt-get install slurm-wlm munge)")
    with make_desk(tmp_path) as made:
        made.write("my_study.py", STUDY)
        yield made


@pytest.fixture
def cluster(desk: Desk) -> Iterator[Desk]:
    """A desk beside a cluster of one node, which is idle again at the end."""
    # A short path, because that of a socket has few characters.
    folder, munge = desk.folder / "slurm", desk.temporary / "munge"
    for each in (folder / "state", folder / "spool"):
        each.mkdir(parents=True)
    facts = {"folder": folder, "munge": munge, "host": socket.gethostname().partition(".")[0]}
    facts |= {"user": getpass.getuser(), "controller_port": free_port(), "node_port": free_port()}
    path = folder / "slurm.conf"
    path.write_text(CONFIGURATION.format(**facts))
    key = folder / "munge.key"
    key.write_bytes(os.urandom(128))
    key.chmod(0o400)
    files = {"socket": munge, "key-file": key, "pid-file": folder / "munge.pid", "seed-file": folder / "munge.seed"}
    start(desk, "munged", "--force", "--foreground", *(f"--{name}={file}" for name, file in files.items()))
    until(munge.exists, 20, desk.said)
    desk.environment["SLURM_CONF"] = str(path)
    start(desk, "slurmctld", "-D", "-f", str(path))
    start(desk, "slurmd", "-D", "-f", str(path))
    until(lambda: "State=IDLE" in said(desk, "scontrol", "show", "node"), 60, desk.said)
    try:
        yield desk
    finally:
        said(desk, "scancel", f"--user={getpass.getuser()}")
        until(lambda: not said(desk, "squeue", "--noheader"), 60, desk.said)


@pytest.fixture
def fleet(desk: Desk, redis_url: str, unique: Callable[[str], str]) -> Fleet:
    made = Fleet(redis_url, redis_url, *(unique(name) for name in ("gpu_large", "gpu_small", "cpu")))
    desk.environment |= made.environment | {"SHADHO_CORES": "2"}
    return made


def _program(name: str) -> str | None:
    # Debian's daemons are not on the PATH of every user.
    return shutil.which(name, path=os.pathsep.join([os.environ["PATH"], "/usr/sbin", "/sbin"]))


def start(desk: Desk, name: str, *words: str) -> None:
    desk.start(str(_program(name)), *words)


def said(desk: Desk, name: str, *words: str) -> str:
    """What a command of SLURM prints; "" if it fails, as before the controller answers."""
    done = subprocess.run(
        [str(_program(name)), *words], env=desk.environment, capture_output=True, text=True, check=False
    )
    return "" if done.returncode else done.stdout.strip()


def notes(desk: Desk, what: str) -> list[list[str]]:
    """(trial, attempt, step if it began, task, restarts) of each note."""
    path = desk.folder / "log"
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return [rest for word, *rest in lines if word == what]


def test_a_study_ends_on_an_array_of_workers_of_which_one_is_requeued(cluster: Desk, fleet: Fleet) -> None:
    """Its trial goes on elsewhere without a lost attempt, and the requeued worker takes trials again."""
    desk = cluster
    words = ["--count", "2", "--for", "5m", "--grace", "10s", "--idle-exit", "8s", "--import", "my_study", "--submit"]
    submitted = desk.told("slurm", "--class", fleet.cpu, *words)
    assert submitted.code == 0, submitted.err
    job = submitted.out.split()[-1]
    study = desk.launch("my_study", "--trials", "16")
    until(lambda: {task for *_, task, _ in notes(desk, "began")} == {"1", "2"}, 60, lambda: told(desk))
    assert said(desk, "scontrol", "requeue", f"{job}_1") == ""
    # Otherwise SLURM waits two minutes. A job that starts in the second of its requeue has a credential that slurmd has
    # just revoked, and SLURM ends it.
    until(lambda: "PENDING" in said(desk, "squeue", "--noheader", "--format=%T", f"--job={job}_1"), 60, desk.said)
    said(desk, "scontrol", "update", f"JobId={job}_1", "StartTime=now+5")
    assert study.wait(120).code == 0, told(desk)
    assert {(trial["state"], trial["lost"]) for trial in desk.trials()} == {("COMPLETE", 0)}, told(desk)
    assert {trial["attempt"] for trial in desk.trials()} == {1, 2}, told(desk)
    first = {trial for trial, attempt, *_ in notes(desk, "began") if attempt == "1"}
    again = [int(step) for trial, attempt, step, *_ in notes(desk, "began") if attempt == "2" and trial in first]
    assert again, told(desk)
    assert min(again) > 0, "from its checkpoint"
    ended = notes(desk, "ended")
    assert sorted(int(trial) for trial, *_ in ended) == list(range(16)), "each once"
    assert ("1", "1") in {(task, restarts) for *_, task, restarts in ended}, told(desk)
    until(lambda: not said(desk, "squeue", "--noheader"), 60, lambda: told(desk))
    log = (desk.folder / f"slurm-{job}_1.out").read_text()
    assert log.count(f"serving class {fleet.cpu}") == 2, log


def test_scale_submits_jobs_of_one_core_whose_workers_have_one_slot(
    cluster: Desk, fleet: Fleet, redis_url: str
) -> None:
    """Memory and cores are those of the allocation, although this SLURM does not bind processes to them."""
    desk = cluster
    desk.environment |= {"SHADHO_ALLOW_UNSIGNED_CONTROL": "1"}
    desk.study("quick", seconds=0.5)
    spec = "max_workers = 2\nstartup_seconds = 5\nmemory_gib = 0.25\nprice = 1.5\n"
    desk.write("classes.toml", f"[classes.{fleet.cpu}]\n{spec}")
    words = ["--class-spec", "classes.toml", "--max", "2", "--cooldown", "1s", "--slurm", "--", "--for", "5m"]
    words += ["--grace", "10s", "--python", sys.executable, "--import", "quick", "--", "--cpus-per-task=1"]
    scaler = desk.start(sys.executable, "-m", "shadho_celery", "scale", *words)
    study = desk.launch("quick", "--trials", "24", "--class-spec", "classes.toml")
    with connect(redis_url) as client:
        workers = Registry(client, Worker)
        until(lambda: len(workers.living()) == 2, 60, lambda: told(desk))
        facts = {
            (each.slots, each.machine.cores, each.machine.memory, each.price) for each in workers.living().values()
        }
    assert facts == {(1, 1, 256 * 2**20, 1.5)}
    assert study.wait(90).code == 0, told(desk)
    assert desk.states() == {"COMPLETE": 24}
    until(lambda: not said(desk, "squeue", "--noheader"), 60, lambda: told(desk))
    scaler.interrupt()
    assert scaler.wait(20).code == 130
    assert "Warning" not in scaler.err


def told(desk: Desk) -> str:
    """What the commands and the jobs have said, for a test that fails."""
    logs = [path.read_text() for path in sorted(desk.folder.glob("slurm-*.out"))]
    return "\n".join([*logs, said(desk, "squeue"), desk.said()])
