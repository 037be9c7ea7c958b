"""Every command of the README does what the README says of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from acceptance.commands import ROOT, Desk, until

from shadho_celery.registry import Registry, connect

pytestmark = pytest.mark.timeout(240)

README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```", README, re.MULTILINE | re.DOTALL)
COMMANDS = [line for language, text in BLOCKS if language == "bash" for line in text.splitlines()]
PYTHON = [text for language, text in BLOCKS if language == "python"]
FLEET = "CELERY_BROKER_URL=amqp://127.0.0.1 SHADHO_REDIS_URL=redis://127.0.0.1/0"


def last_part(command: str) -> str:
    """What remains of a command once the environment stands: the install needs a network and is what CI begins with."""
    return command.rsplit(" && ", maxsplit=1)[-1]


def shell(desk: Desk, command: str, seconds: float = 120.0, **environment: str) -> str:
    """Run a command as typed; what it printed."""
    run = desk.start("bash", "-c", command, **environment).wait(seconds)
    assert run.code == 0, desk.said()
    return run.out


@pytest.fixture
def first_study(desk: Desk) -> Desk:
    """The README's first study, saved as it says."""
    desk.write("my_study.py", PYTHON[0])
    return desk


#: what each command of the README is run by, below
RUN_BY = {
    "launch tasks.svm": "test_the_main_job",
    "-m pytest": "test_the_test_command_is_what_ci_runs",
    "launch my_study": "test_the_first_study",
    "docker compose": "test_the_servers_of_the_compose_file",
    "export ": "test_growing_to_a_fleet",
    "SHADHO_IMPORTS=": "test_growing_to_a_fleet",
    "worker --import": "test_growing_to_a_fleet",
    "openssl": "test_signing_what_travels",
    "SHADHO_SIGNING_KEY_FILE": "test_signing_what_travels",
    "simulate": "test_planning_a_fleet",
    "--help": "test_help",
    "overhead.py": "test_the_overhead_benchmark",
    "tasks.sync_sgd": "test_training_in_several_slots",
}


def test_every_command_has_its_test() -> None:
    """A command that is added to the README needs a line in the table above, and a test."""
    missing = [line for line in COMMANDS if not any(part in line for part in RUN_BY)]
    assert not missing
    assert set(RUN_BY.values()) <= set(globals())


def test_the_main_job(desk: Desk) -> None:
    """The first command ends with a table of the best trials, and says where they lie and how to go on."""
    command = next(line for line in COMMANDS if line.endswith("launch tasks.svm"))
    assert '-e ".[sklearn]"' in command
    out = shell(desk, last_part(command))
    assert "what the objective got" in out
    assert "store: sqlite:///shadho.db" in out
    assert "--resume" in out
    assert desk.states().total() == 40


def test_the_test_command_is_what_ci_runs() -> None:
    """.ci/run installs and tests as the README says."""
    command = next(line for line in COMMANDS if line.endswith("-m pytest"))
    script = (ROOT / ".ci" / "run").read_text()
    *_, install, test = command.split(" && ")
    assert install in script
    assert f"\n{test} ||" in script


def test_the_first_study(first_study: Desk) -> None:
    """The study of twenty lines runs, is resumed to its new total, and gives JSON."""
    assert len(PYTHON[0].strip().splitlines()) <= 20
    commands = [line for line in COMMANDS if line.startswith("python -m shadho_celery.launch my_study")]
    assert len(commands) == 3
    for command, counted in zip(commands, (30, 60, 80), strict=True):
        out = shell(first_study, command)
        assert first_study.states().total() == counted
    assert json.loads(out)["trials"]["complete"] == 20


def test_the_program_of_its_own(desk: Desk) -> None:
    """The search within one's own program finds its minimum."""
    desk.write("own.py", PYTHON[1])
    params, loss = shell(desk, f"{sys.executable} own.py").rsplit(" ", 1)
    assert "'x': " in params
    assert float(loss) < 0.1


def test_the_servers_of_the_compose_file() -> None:
    """The compose file that the README starts has both servers; tests/unit/test_deploy.py reads it closely."""
    assert "docker compose -f deploy/compose.yml up -d" in COMMANDS
    text = (ROOT / "deploy" / "compose.yml").read_text()
    assert "rabbitmq:" in text
    assert "redis:" in text


def test_growing_to_a_fleet(first_study: Desk, amqp_url: str, redis_url: str) -> None:
    """Two workers started as the README says carry a study that is launched as it says."""
    export, by_hand, detected = (
        next(line for line in COMMANDS if part in line) for part in ("export ", "SHADHO_IMPORTS=", "worker --import")
    )
    launch = next(line for line in COMMANDS if line.startswith(FLEET))

    def here(command: str) -> str:
        # Tests share the servers: each has a database or a virtual host of its own.
        return command.replace("amqp://127.0.0.1", amqp_url).replace("redis://127.0.0.1/0", redis_url)

    assert urlsplit(amqp_url).scheme == "amqp"
    first_study.start("bash", "-c", f"{here(export)}; exec env {by_hand}")
    first_study.start("bash", "-c", f"{here(export)}; exec {detected}")
    registry = Registry(connect(redis_url), "worker")
    until(lambda: len(registry.living()) == 2, 30, first_study.said)
    out = shell(first_study, here(launch))
    assert "30 complete, 0 failed" in out
    used = {trial["compute_class"] for trial in first_study.trials()}
    assert used == {"gpu_large", "cpu"}


def test_signing_what_travels(first_study: Desk, redis_url: str) -> None:
    """With a key made as the README says a study runs where the worker has it, and its results carry signatures."""
    make, export = (
        next(line for line in COMMANDS if part in line) for part in ("openssl", "export SHADHO_SIGNING_KEY_FILE")
    )
    urls = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    shell(first_study, make)
    worker = "python -m shadho_celery.worker --class cpu --slots 1 --import my_study"
    first_study.start("bash", "-c", f"{export}; exec {worker}", **urls)
    until(lambda: Registry(connect(redis_url), "worker").living(), 30, first_study.said)
    out = shell(first_study, f"{export}; python -m shadho_celery.launch my_study --trials 5", **urls)
    assert "5 complete, 0 failed" in out
    unsigned = first_study.launch("my_study", "--trials", "5", "--seconds", "4", **urls).wait()
    assert "5 complete" not in unsigned.out


def test_training_in_several_slots(desk: Desk) -> None:
    """The digits are learned by a gang alone, and as a study whose gangs come from the queue."""
    alone, study = (line for line in COMMANDS if "tasks.sync_sgd" in line)
    out = shell(desk, alone, seconds=200)
    accuracy = re.search(r"accuracy (\S+)", out)
    assert accuracy
    assert float(accuracy[1]) > 0.9
    out = shell(desk, study, seconds=230)
    assert "4 complete, 0 failed" in out
    assert max(trial["slots"] for trial in desk.trials()) > 1


def test_planning_a_fleet(desk: Desk) -> None:
    """The example of a cluster file is written and played under both policies."""
    write, play = (line for line in COMMANDS if "shadho_celery.simulate" in line and not line.endswith("--help"))
    shell(desk, write)
    out = shell(desk, play)
    assert "policy cost" in out
    assert "policy fifo" in out
    assert "10800 simulated seconds" in out


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.endswith("--help")])
def test_help(desk: Desk, command: str) -> None:
    """--help lists the options and true examples."""
    out = shell(desk, command)
    assert "Examples:" in out
    assert ("--url-file" in out) != ("simulate" in command)


def test_the_overhead_benchmark(desk: Desk, redis_url: str) -> None:
    """The benchmark runs to its last line, one JSON object with figures and goals; here with as little as it takes."""
    command = next(line for line in COMMANDS if "overhead.py" in line)
    script = command.replace("tests/", f"{ROOT}/tests/").replace("python", sys.executable, 1)
    out = shell(desk, f"{script} --trials 40 --repeats 1 --broker redis --redis-url {redis_url}", seconds=200)
    last = json.loads(out.strip().splitlines()[-1])
    assert set(last) == {"figures", "goals"}
    assert set(last["goals"]) >= {"redis_study_vs_bare_threads", "redis_study_vs_optuna", "memory_mb_per_100k"}


def test_the_picture_is_there() -> None:
    """Every picture that the README shows is in the checkout."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", README)
    assert pictures
    assert all((ROOT / Path(picture)).is_file() for picture in pictures)
