"""What a person types after the search, and during it: the results of a study, and its deletion."""

from __future__ import annotations

import json
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from acceptance.commands import Command, Desk, until
from acceptance.commands import desk as open_desk
from click.testing import CliRunner

from shadho_celery.cli.group import commands
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.files import STORAGE_TOKEN
from shadho_celery.core.hardware import Machine
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Progress, Registry, RunningTrial, Share, StudyWants, Worker

pytestmark = pytest.mark.timeout(120)


@pytest.fixture
def desk(no_orphans: None, tmp_path: Path) -> Iterator[Desk]:
    with open_desk(tmp_path) as made:
        yield made


def typed(desk: Desk, *words: str, **environment: str) -> Command:
    """``shadho-celery WORDS``, as the module."""
    return desk.start(sys.executable, "-m", "shadho_celery", *words, **environment)


@pytest.mark.sample
def test_results_are_there_while_a_study_runs_and_go_with_its_deletion(desk: Desk) -> None:
    body = (
        "context.report(1, 9.0); assert context.trial != 2 and context.study == 'mine'; kept = context.checkpoint_dir"
    )
    desk.study(seconds=0.2, body=body)
    run = typed(desk, "run", "my_study", "--trials", "1000", "--workers", "cpu=2", "--study", "mine")
    desk.await_runs(6, "ended")
    show, removal, status, failed = (
        desk.told(*words.split()) for words in ("show mi", "rm mine --yes", "status", "trials mine --failed")
    )
    assert (show.code, status.code, failed.code) == (0, 0, 0), desk.said()
    assert "running on " in show.out.splitlines()[-1]
    assert "what the objective got" in show.out
    assert re.search(r"│ mine +│ \S+ +│ running +│ +1 │ +\d+ of 1000 │", status.out), desk.said()
    assert "AssertionError" in failed.out
    assert removal.code == 2
    assert "stop it first" in removal.err
    run.interrupt()
    run.wait(30)
    assert run.code == 0, desk.said()
    trials = {trial["number"]: trial for trial in desk.trials()}
    best = desk.told("best", "mine", "--json").json()
    assert best["loss"] == min(trial["loss"] for trial in trials.values() if trial["loss"] is not None)
    assert best["values"]["x"] == best["loss"]
    trial = desk.told("trial", "mine", "2")
    assert "Traceback (most recent call last)" in trial.out
    gone = desk.told("rm", "mine", "--yes")
    assert gone.code == 0, desk.said()
    assert f"study mine with {len(trials)} trials" in gone.out
    assert desk.trials() == []
    assert {path.name for path in desk.folder.glob(".shadho/**/*") if path.is_file()} == {STORAGE_TOKEN}, (
        "no study's own"
    )


def test_the_status_of_a_fleet_needs_no_study(desk: Desk, amqp_url: str, redis_url: str) -> None:
    urls = {"CELERY_BROKER_URL": amqp_url, "SHADHO_REDIS_URL": redis_url}
    desk.study()
    nobody = desk.told("status", **urls)
    assert nobody.code == 0, desk.said()
    assert "no study runs\nno worker is live" in nobody.out
    typed(desk, "worker", "--class", "rack-7", "--slots", "3", "--import", "my_study", **urls)
    until(lambda: Registry(connect(redis_url), Worker).living(), 30, desk.said)
    shown = typed(desk, "status", **urls).wait()
    assert shown.code == 0, desk.said()
    assert "rack-7" in shown.out
    facts = desk.told("status", "--json", **urls).json()["classes"]["rack-7"]
    assert (facts["workers"], facts["slots"], facts["busy"], facts["queue"]) == (1, 3, 0, 0)
    assert facts["imports"] == ["my_study"]


def test_the_status_names_the_machines_that_have_other_code(amqp_url: str, redis_url: str) -> None:
    registry = Registry(connect(redis_url), Worker)
    for host, digest in (("a", "0" * 12), ("b", "1" * 12), ("c", "1" * 12), ("d", "")):
        codes = {"my_study": CodeVersion(digest=digest), "other": CodeVersion(digest="2" * 12)}
        machine = Machine(host=host)
        registry.announce(host, Worker(protocol=PROTOCOL, compute_class="cpu", machine=machine, codes=codes))
    urls = {"CELERY_BROKER_URL": amqp_url, "SHADHO_REDIS_URL": redis_url}
    shown = CliRunner().invoke(commands, ["status"], env=urls)
    told = (
        f"3 versions of its code, but a study uses only one: {'0' * 12} on a; {'1' * 12} on b, c; one that fails on d"
    )
    assert told in shown.output
    assert "other has" not in shown.output


def test_the_status_lists_studies_by_name_and_shows_no_terminal_what_it_would_obey(
    amqp_url: str, redis_url: str
) -> None:
    client = connect(redis_url)
    studies, workers = Registry(client, StudyWants), Registry(client, Worker)
    progress = Progress(ended=3, limit=9, running=2, waiting=1)
    studies.announce("k2", StudyWants(name="svm", weight=2.5, progress=progress, wanted_slots={"cloud": 4}))
    studies.announce("k1", StudyWants(name="b\x9b31m\u202e", progress=Progress(ended=7)))
    studies.announce("old\x1b[31m" + "x" * 1000, StudyWants())
    workers.announce("w\x1b[31m", Worker(protocol=PROTOCOL, compute_class="\x9bc", machine=Machine(host="\u202eh")))
    # An hour, as a second passes, and more trials than are shown.
    trials = [RunningTrial(number=number, started_at=time.time() - 3630, rank=number or None) for number in range(9)]
    held = {"k2": Share(name="svm", slots=9, trials=trials[:1]), "k1\x9b": Share(slots=8, trials=trials[1:])}
    workers.announce("v", Worker(protocol=PROTOCOL, compute_class="cpu", slots=9, busy=9, ended=4, studies=held))
    urls = {"CELERY_BROKER_URL": amqp_url, "SHADHO_REDIS_URL": redis_url, "COLUMNS": "600"}
    shown, told = (CliRunner().invoke(commands, ["status", *more], env=urls) for more in ([], ["--json"]))
    assert (shown.exit_code, told.exit_code) == (0, 0)
    assert (shown.output + told.output).replace("\n", "").isprintable()
    rows = [line.strip("│ ").replace(" ", "").split("│") for line in shown.output.splitlines()]
    told_now = {f"{seconds}sago" for seconds in range(20)}
    [row] = [row for row in rows if row[0] == "svm"]
    assert row[:7] == ["svm", "-", "running", "2.5", "3of9", "2", "1"]
    assert row[7] in told_now
    assert ["b\\x9b31m\\u202e", "-", "running", "1", "7", "0", "0"] in [row[:7] for row in rows]
    [row] = [row for row in rows if row[0] == "v"]
    assert row[4] in told_now
    assert [*row[:4], row[5]] == ["v", "9", "9", "4", "serving"]
    assert row[6].startswith("svm:0(1h);k1\\x9b:1replica1(1h),2replica2(1h)")
    assert row[6].endswith("7replica7(1h)and1more")
    assert ["w\\x1b[31m", "0", "0", "-", "serving"] in [[*row[:4], *row[5:6]] for row in rows]
    by_key = {study["key"]: study for study in json.loads(told.output)["studies"]}
    assert by_key["k2"]["wanted_slots"] == {"cloud": 4}
    assert json.loads(told.output)["classes"]["cloud"]["wanted"] == 4
    assert [row[:7] for row in rows if row[0] == "cloud"] == [["cloud", "0", "0", "0", "0", "4", "-"]]
    assert by_key["k2"]["trials"] == {"ended": 3, "limit": 9, "running": 2, "waiting": 1}
    assert by_key["k1"]["name"] == "b\\x9b31m\\u202e"
