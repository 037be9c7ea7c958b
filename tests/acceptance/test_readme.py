"""Every command of the README, and of those beside the code, does what its document says of it."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from acceptance import test_readme_long, test_readme_training
from acceptance.commands import ROOT, Desk, until
from acceptance.documents import COMMANDS, PYTHON, TEXTS, commands, in_tests, last_part, shell

from shadho_celery.transport.redis import connect
from shadho_celery.transport.registry import Registry, Worker

pytestmark = pytest.mark.timeout(240)


@pytest.fixture
def first_study(desk: Desk) -> Desk:
    """The README's first study, saved as it says."""
    desk.write("my_study.py", PYTHON[0])
    return desk


#: what each command of the documents is run by, below, in test_readme_long or in test_readme_training
RUN_BY = {
    "run tasks.svm --trials 20": "test_the_options_of_placement_and_samplers",
    "run tasks.svm": "test_the_main_job",
    "run tasks.mlp --pruner": "test_a_search_that_prunes",
    "run tasks.unet": "test_unets_that_find_cells",
    "fidelity.py": "test_the_fidelity_benchmark",
    "-m pytest -n 0": "test_one_folder_of_tests",
    "-m pytest": "test_the_test_command_is_what_ci_runs",
    "shadho-celery logs": "test_the_output_of_a_trial",
    "run my_study": "test_the_first_study",
    "shadho-celery": "test_the_result_commands",
    "docker compose": "test_the_servers_of_the_compose_file",
    "export CELERY_BROKER_URL": "test_growing_to_a_fleet",
    "SHADHO_IMPORTS=": "test_growing_to_a_fleet",
    "worker --import": "test_growing_to_a_fleet",
    "openssl": "test_signing_what_travels",
    "SHADHO_SIGNING_KEY_FILE": "test_signing_what_travels",
    "--help": "test_help",
    "simulate": "test_planning_a_fleet",
    "overhead.py": "test_the_overhead_benchmark",
    "picture.py": "test_the_picture_of_the_live_view",
    "placement.py": "test_the_placement_benchmark",
    "run my_gang": "test_the_gang_of_the_training_readme",
    "tasks.sync_sgd": "test_training_in_several_slots",
    "--trials 2": "test_the_other_tasks",
    "backup_sgd.py --only curve": "test_the_picture_of_backups",
    "backup_sgd.py": "test_the_benchmarks_of_training",
    "modes.py": "test_the_benchmarks_of_training",
    "adsaga.py": "test_the_benchmarks_of_training",
}


@pytest.mark.sample
def test_every_command_has_its_test() -> None:
    """A command that is added to a document needs a line in the table above, and a test."""
    missing = [line for line in COMMANDS if not any(part in line for part in RUN_BY)]
    assert not missing
    assert set(RUN_BY.values()) <= {*globals(), *vars(test_readme_long), *vars(test_readme_training)}


@pytest.mark.sample
@pytest.mark.parametrize("path", TEXTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_document_is_narrow_and_its_links_lead_somewhere(path: Path) -> None:
    lines = TEXTS[path].splitlines()
    assert max(map(len, lines)) <= 120
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[path].replace("\n", " "))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.sample
def test_the_readme_is_short() -> None:
    assert len(TEXTS[ROOT / "README.md"].splitlines()) <= 140


def test_the_main_job(desk: Desk) -> None:
    """The first command ends with a table of the best trials, and says where they lie and how to go on."""
    command = next(line for line in COMMANDS if line.endswith("run tasks.svm"))
    assert '-e ".[sklearn]"' in command
    out = shell(desk, last_part(command))
    assert "what the objective got" in out
    assert "store: sqlite:///shadho.db" in out
    assert "--resume" in out
    assert desk.states().total() == 40


@pytest.mark.sample
def test_the_test_command_is_what_ci_runs() -> None:
    """.ci/run installs and tests as the README says."""
    command = next(line for line in COMMANDS if line.endswith("-m pytest"))
    script = (ROOT / ".ci" / "run").read_text()
    *_, install, test = command.split(" && ")
    assert install in script
    assert f'\n{test} -m "" ||' in script


@pytest.mark.sample
def test_the_first_study(first_study: Desk) -> None:
    """The study of twenty lines runs, is resumed to its new total, and gives JSON."""
    assert len(PYTHON[0].strip().splitlines()) <= 20
    lines = [line for line in COMMANDS if line.startswith("shadho-celery run my_study")]
    # The last one is the fleet's.
    assert len(lines) == 3
    for command, counted in zip(lines[:2], (30, 60), strict=True):
        out = shell(first_study, command)
        assert first_study.states().total() == counted
    assert json.loads(out)["trials"]["complete"] == 60


def test_the_output_of_a_trial(first_study: Desk) -> None:
    """The commands for a trial's log print what the trial has printed."""
    body = PYTHON[0].replace("    return {", '    print("it ends")\n    return {')
    first_study.write("my_study.py", body)
    shell(first_study, "shadho-celery run my_study --trials 4 --study my_study --workers cpu=1")
    lines = {line for line in COMMANDS if line.startswith("shadho-celery logs my_study 3")}
    assert len(lines) == 2
    for line in lines:
        printed = shell(first_study, line.replace("shadho-celery", f"{sys.executable} -m shadho_celery"))
        assert printed.endswith(" it ends\n")


def test_the_result_commands(first_study: Desk) -> None:
    """Each command about results does what it says with the first study; the last one, once confirmed, deletes it."""
    assert first_study.launch("my_study", "--trials", "5", "--workers", "cpu=2").wait().code == 0, first_study.said()
    *lines, last = commands(ROOT / "shadho_celery" / "cli" / "README.md")
    said = {line.split()[1]: shell(first_study, line) for line in lines}
    assert "my_study-" in said["studies"]
    assert "5 complete, 0 failed" in said["show"]
    assert "5 trials" in said["trials"]
    assert "trial 3: complete" in said["trial"]
    best = json.loads(said["best"])
    assert best["loss"] == min(trial["loss"] for trial in first_study.trials())
    assert len(json.loads((first_study.folder / "trials.json").read_text())["trials"]) == 5
    assert "no fleet" in said["status"]
    assert "with 5 trials" in shell(first_study, f"yes | {last}")
    assert first_study.trials() == []


def test_the_program_of_its_own(desk: Desk) -> None:
    """The search within one's own program finds its minimum."""
    desk.write("own.py", PYTHON[1])
    # Before it stands the bar that hyperopt draws.
    values, loss, found = shell(desk, f"{sys.executable} -W error own.py").splitlines()[-1].split(" ", 2)
    assert abs(float(values) - 3) < 0.4
    assert float(loss) < 0.1
    assert "'x': " in found


def test_the_servers_of_the_compose_file() -> None:
    """The compose file that the README starts has both servers; tests/unit/test_deploy.py reads it closely."""
    assert "docker compose -f deploy/compose.yml up -d" in COMMANDS
    text = (ROOT / "deploy" / "compose.yml").read_text()
    assert "rabbitmq:" in text
    assert "redis:" in text


def test_growing_to_a_fleet(first_study: Desk, amqp_url: str, redis_url: str) -> None:
    """Two workers started as the README says carry a study that is launched as it says."""
    export, by_hand, detected = (
        next(line for line in COMMANDS if part in line)
        for part in ("export CELERY", "SHADHO_IMPORTS=", "worker --import")
    )
    launch = "shadho-celery run my_study"
    assert launch in commands(ROOT / "README.md")

    def here(command: str) -> str:
        # Tests share the servers: each has a database or a virtual host of its own.
        return command.replace("amqp://127.0.0.1", amqp_url).replace("redis://127.0.0.1/0", redis_url)

    assert urlsplit(amqp_url).scheme == "amqp"
    first_study.start("bash", "-c", f"{here(export)}; exec env {by_hand}")
    first_study.start("bash", "-c", f"{here(export)}; exec {detected}")
    registry = Registry(connect(redis_url), Worker)
    until(lambda: len(registry.living()) == 2, 30, first_study.said)
    out = shell(first_study, f"{here(export)}; {launch}")
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
    until(lambda: Registry(connect(redis_url), Worker).living(), 30, first_study.said)
    out = shell(first_study, f"{export}; shadho-celery run my_study --trials 5", **urls)
    assert "5 complete, 0 failed" in out
    unsigned = first_study.launch("my_study", "--trials", "5", "--seconds", "4", **urls).wait()
    assert "5 complete" not in unsigned.out


def test_planning_a_fleet(desk: Desk) -> None:
    """The example of a cluster file is written, played under both policies, and its trials are written."""
    write, play, out = (line for line in COMMANDS if "shadho_celery.simulate" in line and not line.endswith("--help"))
    shell(desk, write)
    shown = shell(desk, play)
    assert "policy cost" in shown
    assert "policy fifo" in shown
    assert "10800 simulated seconds" in shown
    shell(desk, out)
    assert (desk.folder / "trials.csv").read_text().startswith("number,family,class,slot,start,end,state\n")


@pytest.mark.parametrize("command", [line for line in COMMANDS if "run tasks.svm --trials 20" in line])
def test_the_options_of_placement_and_samplers(desk: Desk, command: str) -> None:
    """The options that the documents name are those of a study that runs."""
    assert "20 complete, 0 failed" in shell(desk, command)


def test_one_folder_of_tests() -> None:
    """The command for one folder names one that there is."""
    command = next(line for line in COMMANDS if "-m pytest -n 0" in line)
    assert (ROOT / command.rsplit(" ", 1)[1]).is_dir()


def test_a_placement_benchmark_without_its_table(desk: Desk) -> None:
    """It names the table that the folder lacks, and a folder that has it."""
    command = next(line for line in COMMANDS if line.endswith("placement.py tests/benchmarks/data"))
    script = in_tests(command.replace("tests/benchmarks/data", str(desk.folder)), "")
    run = desk.start("bash", "-c", script).wait(60)
    assert run.code == 2
    assert run.err.splitlines()[-1].count("gavel_single_gpu.json") == 1
    assert "tests/benchmarks/data" in run.err


@pytest.mark.parametrize("command", [line for line in COMMANDS if line.endswith("--help")])
def test_help(desk: Desk, command: str) -> None:
    """--help lists the options and true examples."""
    out = shell(desk, command.replace("tests/", f"{ROOT}/tests/"))
    assert "Examples:" in out or "benchmarks" in command
    assert ("--url-file" in out) == (" run" in command or "worker" in command)


@pytest.mark.sample
def test_the_picture_is_there() -> None:
    """Every picture that the README shows is in the checkout."""
    pictures = re.findall(r"!\[[^]]*\]\(([^)]+)\)", TEXTS[ROOT / "README.md"])
    assert pictures
    assert all((ROOT / Path(picture)).is_file() for picture in pictures)
