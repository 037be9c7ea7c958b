"""Every command of the README, and of those beside the code, does what its document says of it."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
import urllib.request
from pathlib import Path
from urllib.parse import urlsplit

import pytest
import services
from acceptance import test_hydra, test_operate, test_readme_long, test_readme_training
from acceptance.commands import ROOT, Desk, until
from acceptance.documents import COMMANDS, OPERATE, PYTHON, TEXTS, blocks, commands, in_tests, last_part, shell
from services import documents
from services.cases import cases
from services.extras import needed
from services.tracked import read_mlflow, read_tensorboard

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker
from shadho_celery.fleet.signing import read_keys

pytestmark = pytest.mark.timeout(240)


CLI = documents.DOCUMENTS["cli"]

#: commands of that document that steer a running study
STEERING = ("pause", "unpause", "cancel", "enqueue", "note", "set", "stop")
#: parts of those that run trials themselves
RUNNING = ("--dry-run", " again ", "--retry-failed")


@pytest.fixture
def first_study(desk: Desk) -> Desk:
    """The README's first study, saved as it says."""
    desk.write("my_study.py", PYTHON[0])
    return desk


#: what each command of the documents is run by, below or in one of the modules imported above
RUN_BY = {
    "run my_study --dry-run": "test_a_look_before_a_search_and_failed_trials_after_it",
    "shadho-celery again": "test_a_look_before_a_search_and_failed_trials_after_it",
    "--retry-failed": "test_a_look_before_a_search_and_failed_trials_after_it",
    "run my_study --policy": "test_the_options_of_placement_and_samplers",
    "run my_study --sampler": "test_the_options_of_placement_and_samplers",
    "run my_study --track": "test_a_study_in_trackers",
    "run my_study --trials 30 --max-cost": "test_the_money_that_a_study_costs",
    "worker --price": "test_the_money_that_a_study_costs",
    "shadho-celery exporter": "test_the_metrics_of_a_run_and_of_a_worker",
    "--metrics-port": "test_the_metrics_of_a_run_and_of_a_worker",
    "run -- python train.py": "test_the_commands_that_are_searched",
    "run study.toml": "test_the_commands_that_are_searched",
    "hydra/sweeper=shadho": "test_a_sweep_that_is_interrupted_continues",
    "run tasks.svm": "test_the_main_job",
    "run tasks.mlp --pruner": "test_a_search_that_prunes",
    "run tasks.unet": "test_unets_that_find_cells",
    "fidelity.py": "test_the_fidelity_benchmark",
    "-m pytest -n 0": "test_one_folder_of_tests",
    "-m pytest": "test_the_test_command_is_what_ci_runs",
    "shadho-celery pause": "test_steering_a_running_study",
    "shadho-celery unpause": "test_steering_a_running_study",
    "shadho-celery cancel": "test_steering_a_running_study",
    "shadho-celery enqueue": "test_steering_a_running_study",
    "shadho-celery note": "test_steering_a_running_study",
    "shadho-celery set": "test_steering_a_running_study",
    "shadho-celery stop": "test_steering_a_running_study",
    "shadho-celery logs": "test_the_output_of_a_trial",
    "shadho-celery doctor": "test_the_doctor",
    "--class-spec": "test_workers_on_demand",
    "shadho-celery fleet": "test_two_machines",
    "fleet/env": "test_two_machines",
    "run my_study --code ship": "test_two_machines",
    "shadho-celery slurm": "test_the_script_for_slurm",
    "run my_study": "test_the_first_study",
    "shadho-celery": "test_the_result_commands",
    "docker compose": "test_the_servers_of_the_compose_file",
    "export CELERY_BROKER_URL": "test_growing_to_a_fleet",
    "SHADHO_IMPORTS=": "test_growing_to_a_fleet",
    "worker --import": "test_growing_to_a_fleet",
    "openssl rand -hex 32 >> ": "test_changing_the_key",
    "sed -i": "test_changing_the_key",
    "openssl": "test_signing_what_travels",
    "SHADHO_SIGNING_KEY_FILE": "test_signing_what_travels",
    "export SHADHO_USER_KEY_FILE": "test_the_book_brings_up_a_signed_fleet_with_tls_on_which_people_run_studies",
    "shadho-celery fleet key": "test_the_book_brings_up_a_signed_fleet_with_tls_on_which_people_run_studies",
    "shadho-celery fleet policy": "test_the_book_brings_up_a_signed_fleet_with_tls_on_which_people_run_studies",
    "--help": "test_help",
    "simulate": "test_planning_a_fleet",
    "overhead.py": "test_the_overhead_benchmark",
    "shadho-celery dashboard": "test_the_dashboard",
    "curl ": "test_the_dashboard",
    "URL=http": "test_the_dashboard",
    "picture.py": "test_the_picture_of_the_dashboard",
    "placement.py": "test_the_placement_benchmark",
    "fleets_of_people.py": "test_the_benchmark_of_fleets",
    "run my_gang": "test_the_gang_of_the_training_readme",
    "run my_ranks": "test_the_process_group_of_the_ranks_readme",
    "run my_launch": "test_the_launch_of_the_ranks_readme",
    "tasks.ddp": "test_a_process_group_is_searched",
    "tasks.sync_sgd": "test_training_in_several_slots",
    "-m tasks.": "test_a_task_alone_compares_methods",
    "--trials 2": "test_the_other_tasks",
    "backup_sgd.py": "test_the_benchmark_of_gangs",
}


@pytest.mark.sample
def test_every_command_has_its_test() -> None:
    """A command that is added to a document needs a line in the table above, and a test.

    Those of the operator's book are all run by one, which needs to know who types them.
    """
    missing = [line for line in COMMANDS if not any(part in line for part in RUN_BY)]
    assert not missing
    assert all(test_operate.typed_by(text) for text in blocks(OPERATE, "bash"))
    modules = test_readme_long, test_readme_training, test_operate, test_hydra
    assert set(RUN_BY.values()) <= {*globals(), *(name for module in modules for name in vars(module))}


@pytest.mark.sample
@cases("path", TEXTS)
def test_a_document_is_narrow_and_its_links_lead_somewhere(path: Path) -> None:
    lines = TEXTS[path].splitlines()
    assert max(map(len, lines)) <= 120
    links = re.findall(r"\]\(([^)#]+)\)", TEXTS[path].replace("\n", " "))
    assert [link for link in links if "://" not in link and not (path.parent / link).exists()] == []


@pytest.mark.sample
def test_the_readme_is_short() -> None:
    assert len(TEXTS[ROOT / "README.md"].splitlines()) < 120


def test_the_main_job(desk: Desk) -> None:
    """The first command ends with a table of the best trials, and says where they lie and how to go on.

    Each kernel is tried, and the classes that the task names are used, though this machine has none of them.
    """
    command = next(line for line in COMMANDS if line.endswith("run tasks.svm"))
    assert '-e ".[sklearn,dashboard]"' in command
    out = shell(desk, last_part(command))
    assert "what the objective got" in out
    assert "store: sqlite:///shadho.db" in out
    assert "--resume" in out
    assert desk.states().total() == 40
    stand_ins = "CPU workers stand in for the classes gpu_large, gpu_small, cpu, one slot each"
    assert stand_ins in desk.commands[-1].err
    report = desk.told("show", "svm", "--json").json()
    assert report["sampler"]["name"] == "auto"
    kernels = {f"kernel={kernel}" for kernel in ("linear", "rbf", "sigmoid", "poly")}
    assert kernels == {*report["subspaces"]}
    # The sampler learns from all of them.
    assert {*report["sampler"]["choices"]} == {"all"}
    assert all(counts["complete"] + counts["failed"] for counts in report["subspaces"].values())
    assert sum(counts["complete"] > 0 for counts in report["classes"].values()) >= 2


@pytest.mark.sample
def test_the_test_command_is_what_ci_runs() -> None:
    """.ci/run installs and tests as the README says, and more extras."""
    command = next(line for line in COMMANDS if line.endswith("-m pytest"))
    script = (ROOT / ".ci" / "run").read_text()
    *_, install, test = command.split(" && ")
    assert install.replace("[test]", "[test,integrations,docs]") in script
    assert f'\n{test} -m "" -n 6 ||' in script


@pytest.mark.sample
def test_the_first_study(first_study: Desk) -> None:
    """The study of twenty lines runs, is resumed to its new total, and gives JSON."""
    assert len(PYTHON[0].strip().splitlines()) <= 20
    lines = [line for line in commands(ROOT / "README.md") if line.startswith("shadho-celery run my_study")]
    # The last one is the fleet's.
    assert len(lines) == 3
    for command, counted in zip(lines[:2], (30, 60), strict=True):
        out = shell(first_study, command)
        assert first_study.states().total() == counted
    assert json.loads(out)["trials"]["complete"] == 60


@pytest.mark.sample
def test_the_commands_that_are_searched(desk: Desk) -> None:
    """A script without a change is searched by a command alone, and by the study in TOML beside it."""
    document = documents.DOCUMENTS["scripts"]
    [study] = blocks(document, "toml")
    desk.write("study.toml", study)
    desk.write("train.py", TRAIN)
    by_command, by_file, *_ = commands(document)
    shell(desk, by_command.replace(" -- ", " --trials 4 -- "))
    assert [trial["loss"] for trial in desk.trials()] == [trial["params"]["lr"] for trial in desk.trials()]
    out = shell(desk, by_file)
    assert "20 complete, 0 failed" in out
    assert desk.told("run", "--", *shlex.split(by_file)).code == 2


#: a script as the document has it: it reads its params from the command line, and prints a line of JSON
TRAIN = """
import argparse, json

parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float, required=True)
parser.add_argument("--opt", choices=["adam", "sgd"], required=True)
parser.add_argument("--layers", type=int)
parser.add_argument("--momentum", type=float)
given = parser.parse_args()
assert given.layers is None or given.layers in (1, 2, 3, 4)
print("epoch 1")
print(json.dumps({"loss": given.lr}))
"""


@pytest.fixture(scope="module")
def results(shared_desk: Desk) -> Desk:
    """A desk with the README's first study after five trials, which print a line."""
    shared_desk.write("my_study.py", PYTHON[0].replace("    return {", '    print("it ends")\n    return {'))
    ended = shared_desk.launch("my_study", "--trials", "5", "--study", "my_study", "--workers", "cpu=2").wait()
    assert ended.code == 0, shared_desk.said()
    return shared_desk


def test_the_output_of_a_trial(results: Desk) -> None:
    """The commands for a trial's log print what the trial has printed."""
    lines = {line for line in COMMANDS if line.startswith("shadho-celery logs my_study 3")}
    assert len(lines) == 2
    for line in lines:
        assert results.told(*shlex.split(line)[1:]).out.endswith(" it ends\n")


def test_the_dashboard(results: Desk) -> None:
    """Each command prints an address; through a tunnel it is the same command on the other machine."""
    shutil.copy(results.folder / "shadho.db", results.folder / "other.db")
    for line in dict.fromkeys(line for line in COMMANDS if "shadho-celery dashboard" in line):
        typed = re.sub(r"^ssh .* node ", "", line).replace("~", str(results.folder))
        free = "" if "--port" in typed else " --port 0"
        command = results.start(
            "bash", "-c", f"exec {typed.replace('shadho-celery', f'{sys.executable} -m shadho_celery')}{free}"
        )
        command.says("dashboard: http://127.0.0.1:")
        if "--token-file" in typed and shutil.which("curl"):
            [url, *_] = re.findall(r"http://127[^/]+", command.out + command.err)
            [address] = [line for line in COMMANDS if line.startswith("URL=")]
            login, studies = [line.replace("~", str(results.folder)) for line in COMMANDS if "curl " in line]
            address = re.sub("(?<==).*", url, address)
            assert "my_study" in shell(results, f"{address}; {login} && {studies}")
        command.interrupt()
        assert command.wait().code == 0, results.said()


def test_the_result_commands(results: Desk) -> None:
    """Each command about results does what it says with the first study; the last one, once confirmed, deletes it.

    The others only print, and run within this process.
    """
    others = [*(f" {name} " for name in STEERING), *RUNNING]
    *lines, last = [line for line in commands(CLI) if not any(part in line for part in others)]
    typed = [shlex.split(line)[1:] for line in lines]
    [left] = results.folder.glob(".shadho/checkpoints/*/")
    for number in range(5):
        (left / str(number)).mkdir()
        (left / str(number) / "model").write_text(str(number))
    said = {words[0]: results.told(*words).out for words in typed}
    assert "my_study" in said["studies"]
    assert "5 complete, 0 failed" in said["show"]
    assert "5 trials" in said["trials"]
    assert "trial 3: complete" in said["trial"]
    best = json.loads(said["best"])
    assert best["loss"] == min(trial["loss"] for trial in results.trials())
    assert (results.folder / "best" / "model").read_text() == str(best["number"])
    assert said["clean"] == "nothing to be deleted\n"
    assert len(json.loads((results.folder / "trials.json").read_text())["trials"]) == 5
    assert "What to try next" in (results.folder / "report.html").read_text()
    assert "no fleet" in said["status"]
    assert "with 5 trials" in shell(results, f"yes | {last}")
    assert results.trials() == []


def test_a_look_before_a_search_and_failed_trials_after_it(desk: Desk) -> None:
    """What five trials would get is printed; trial 3 fails here as it did, and after a fix all run again."""
    look, once_more, retry = [line for line in commands(CLI) if any(part in line for part in RUNNING)]
    desk.study(body="print('side', params['side']); assert context.trial > 5, 'broken'", settings={"trials": 6})
    found = desk.told(*shlex.split(look)[1:])
    assert [{*json.loads(line)} - {"n"} for line in found.out.splitlines()] == [{"side", "x"}] * 5
    assert not (desk.folder / "shadho.db").exists()
    desk.launch("my_study", "--workers", "cpu=2", "--max-failures", "0").wait()
    assert desk.states() == {"FAILED": 6}
    failed = desk.told(*shlex.split(once_more)[1:])
    assert failed.code == 1
    assert "AssertionError: broken" in failed.err
    shell(desk, retry)
    assert desk.states() == {"FAILED": 6, "COMPLETE": 6}


def test_the_doctor(desk: Desk) -> None:
    """It says whether something is wrong with a machine without a fleet."""
    answer = desk.told(*shlex.split(next(line for line in COMMANDS if "doctor" in line))[1:])
    assert answer.code == int("something wrong" in answer.out)
    assert "store: sqlite:///shadho.db" in answer.out


def test_the_script_for_slurm(first_study: Desk) -> None:
    """One command prints a script that bash can parse, the other one gives such a script to sbatch."""
    printed, submitted = (line for line in COMMANDS if "shadho-celery slurm" in line)
    urls = {"CELERY_BROKER_URL": "amqp://host", "SHADHO_REDIS_URL": "redis://host/0"}
    shell(first_study, f"{printed}; bash -n workers.sh", **urls)
    assert "#SBATCH --array=1-4\n" in (first_study.folder / "workers.sh").read_text()
    path = first_study.write("sbatch", "#!/bin/bash\ncat > got\necho Submitted batch job 7\n")
    path.chmod(0o755)
    assert shell(first_study, f'PATH="$PWD:$PATH"; {submitted}', **urls) == "Submitted batch job 7\n"
    assert "#SBATCH --cpus-per-task=8\n" in (first_study.folder / "got").read_text()


def test_workers_on_demand(first_study: Desk, redis_url: str) -> None:
    """The study starts without a worker and says how many slots it wants; spec and options of scale are valid."""
    desk = first_study
    desk.environment |= {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    [spec] = blocks(documents.DOCUMENTS["elastic"], "toml")
    desk.write("classes.toml", spec)
    for name in ("sbatch", "start-workers.sh"):
        desk.write(name, "#!/bin/sh\n").chmod(0o755)
    ours = f"{sys.executable} -m shadho_celery"
    study, *scalers = (line.replace("shadho-celery", ours, 1) for line in COMMANDS if "--class-spec" in line)
    for line in scalers:
        scaler = desk.start("bash", "-c", f'PATH="$PWD:$PATH"; exec {line}')
        scaler.says("scaling gpu_large, cpu to at most 6 workers")
        scaler.interrupt()
        assert scaler.wait(30).code == 130
    running = desk.start("bash", "-c", f"exec {study}")
    running.says("gpu_large: no worker; 1 slot is wanted, cpu: no worker; 16 slots are wanted")
    running.interrupt()
    running.wait(30)


def test_steering_a_running_study(desk: Desk) -> None:
    """Each command that steers a study does what it says, in the order of the document."""
    desk.study(seconds=0.1, body="time.sleep(3600 if context.trial == 12 else 0)")
    desk.write("points.jsonl", '{"side": 0, "x": 0.25}')
    command = desk.launch("my_study", "--trials", "1000", "--workers", "cpu=2")
    until(lambda: 12 in [number for number, *_ in desk.runs()], 60, desk.said)
    lines = [line for line in commands(CLI) if any(f" {name} " in line for name in STEERING)]
    # The document names the module, so each answer names the study first.
    answers = [desk.told(*shlex.split(line)[1:]).out.split(": ")[1].split()[0] for line in lines]
    assert answers == ["paused", "unpaused", "trial", "enqueued", "noted", "set", "stopping"]
    assert command.wait(30).code == 0, desk.said()
    assert desk.states()["CANCELLED"] == 1


def test_the_program_of_its_own(desk: Desk) -> None:
    """The search within one's own program finds its minimum."""
    desk.write("own.py", PYTHON[1])
    # Before it stands the bar that hyperopt draws.
    values, loss, found = shell(desk, f"{sys.executable} -W error own.py").splitlines()[-1].split(" ", 2)
    assert abs(float(values) - 3) < 0.4
    assert float(loss) < 0.1
    assert "'x': " in found


def test_the_search_of_scikit_learn(desk: Desk) -> None:
    """It prints the params that it has found, and their scores, which are good on the test's samples too."""
    [program] = [text for text in blocks(documents.DOCUMENTS["integrations"], "python") if "ShadhoSearchCV" in text]
    desk.write("own.py", program)
    found, *scores = re.fullmatch(r"(\{.*\}) (\S+) (\S+)\n", desk.ran("own.py").out).groups()  # type: ignore[union-attr]
    assert "'svc__gamma': " in found
    assert min(map(float, scores)) > 0.95


def test_the_servers_of_the_compose_file() -> None:
    """The compose file that the document starts has both servers; tests/unit/test_deploy.py reads it closely."""
    assert "docker compose -f deploy/compose.yml up -d --wait" in COMMANDS
    text = (ROOT / "deploy" / "compose.yml").read_text()
    assert "rabbitmq:" in text
    assert "redis:" in text


def test_growing_to_a_fleet(first_study: Desk, amqp_url: str, redis_url: str) -> None:
    """Two workers started as the document on fleets says carry a study that is launched like the first one."""
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


def test_two_machines(first_study: Desk) -> None:
    """A fleet that is started as the README says runs a study on a worker that has joined; here, ssh stays here."""
    desk = first_study
    desk.environment = {name: value for name, value in desk.environment.items() if name != "XDG_STATE_HOME"}
    desk.environment["HOME"] = str(desk.folder)
    desk.write("ssh", '#!/bin/sh\nshift; exec "$@"\n').chmod(0o755)
    start, variables, run = commands(ROOT / "README.md")[-3:]
    once_more, join, again, stop = commands(documents.DOCUMENTS["deploy"])[:4]
    assert (once_more, again) == (start, variables)
    try:
        line = shell(desk, f"{start} --host 127.0.0.1 --port {services.free_port()}")
        assert shell(desk, once_more) == line
        desk.start("bash", "-c", f'PATH="$PWD:$PATH"; {join}').says(" is ready. Class cpu,")
        assert "30 complete, 0 failed" in shell(desk, f"{variables}; {run}")
    finally:
        shell(desk, stop)


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


def test_changing_the_key(desk: Desk) -> None:
    """The three steps add the new key, let it sign, and remove the old one, whose line may have no end.

    test_keys.py takes them on a fleet.
    """
    old = b"0123456789abcdef"
    file = desk.write("shadho.key", old.decode())
    file.chmod(0o600)
    add, swap, remove = (line for line in COMMANDS if line.endswith("shadho.key") and (">>" in line or "sed" in line))
    shell(desk, add)
    first, new = read_keys(file)
    assert first == old
    shell(desk, swap)
    assert read_keys(file) == (new, old)
    shell(desk, remove)
    assert read_keys(file) == (new,)


def test_a_study_in_trackers(first_study: Desk) -> None:
    needed("mlflow")
    needed("tensorboard")
    [command] = [line for line in COMMANDS if "--track" in line]
    shell(first_study, f"{command} --study mine")
    shown = read_mlflow(f"sqlite:///{first_study.folder / 'mlflow.db'}", "mine")
    assert sorted(number for number, _ in shown) == [*range(30)]
    assert sorted(number for number, _ in read_tensorboard(first_study.folder / "runs/mine")) == [*range(30)]


def test_the_money_that_a_study_costs(first_study: Desk, redis_url: str) -> None:
    """A worker announces its price, and the study says what its trials have cost."""
    worker, command = (next(line for line in COMMANDS if part in line) for part in ("worker --price", "--max-cost"))
    urls = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    first_study.start("bash", "-c", f"exec {worker}", **urls)
    until(lambda: Registry(connect(redis_url), Worker).living(), 30, first_study.said)
    out = shell(first_study, command, **urls)
    assert "30 complete, 0 failed" in out
    assert re.search(r"money spent: \d\S* \(cpu \d\S*\); \d\S* a complete trial; \d\S* until the best loss", out)


def test_the_metrics_of_a_run_and_of_a_worker(first_study: Desk, redis_url: str) -> None:
    """They serve them on their ports while they live: the worker says what it has done once the study has ended, and
    the exporter where it says so.
    """
    study, worker = (line for line in COMMANDS if "--metrics-port" in line)
    assert "--metrics-port 9431" in study
    urls = {"CELERY_BROKER_URL": redis_url, "SHADHO_REDIS_URL": redis_url}
    serving = first_study.start("bash", "-c", f"exec {worker.replace('9432', '0')}", **urls)
    serving.says("metrics: http://127.0.0.1:")
    url = re.search(r"metrics: (\S+)", serving.err)
    assert url is not None
    run = first_study.start("bash", "-c", study.replace("9431", "0"), **urls).wait(120)
    assert "30 complete, 0 failed" in run.out
    assert "metrics: http://127.0.0.1:" in run.out + run.err
    with urllib.request.urlopen(url.group(1), timeout=20) as answer:
        assert b'shadho_worker_trials_total{class="cpu",state="complete"} 30.0' in answer.read()
    [exporter] = [line for line in COMMANDS if "shadho-celery exporter" in line]
    typed = exporter.replace("9430", "0").replace("shadho-celery", f"{sys.executable} -m shadho_celery")
    serving = first_study.start("bash", "-c", f"exec {typed}", **urls)
    serving.says("metrics: http://127.0.0.1:")
    found = re.search(r"metrics: (\S+)/metrics", serving.out)
    assert found is not None
    with urllib.request.urlopen(f"{found.group(1)}/sd", timeout=20) as answer:
        assert json.load(answer)[0]["targets"] == [url.group(1).split("/")[2]]


def test_planning_a_fleet(desk: Desk) -> None:
    """The example of a cluster file is written, played under both policies, and its trials are written and stored.

    Here, it ends after a quarter of an hour.
    """
    write, play, out, keep = (
        line for line in COMMANDS if "shadho_celery.simulate" in line and not line.endswith("--help")
    )
    shell(desk, write)
    cluster = desk.folder / "cluster.py"
    text = cluster.read_text()
    assert '"seconds": 10800' in text
    cluster.write_text(text.replace('"seconds": 10800', '"seconds": 900'))
    shown = shell(desk, play)
    assert "policy cost" in shown
    assert "policy fifo" in shown
    assert "900 simulated seconds" in shown
    shell(desk, out)
    shell(desk, keep)
    assert "simulated-cluster-cost-" in shell(desk, "shadho-celery studies")
    assert (desk.folder / "trials.csv").read_text().startswith("number,subspace,class,slot,start,end,state\n")


def test_the_options_of_placement_and_samplers(first_study: Desk) -> None:
    """The options that the documents name are those of a study that runs."""
    for line in [line for line in COMMANDS if re.search("run my_study --(policy|sampler)", line)]:
        answer = first_study.told(*shlex.split(line)[1:])
        assert "30 complete, 0 failed" in answer.out, answer.err


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
