"""Every store keeps what it is given, to one writer at a time."""

from __future__ import annotations

import dataclasses
import os
import re
import shutil
import socket
import sqlite3
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from operator import attrgetter
from pathlib import Path
from typing import Any

import pytest
import services
import sqlalchemy as sa
from msgspec.structs import replace

from shadho_celery.charts.fleet import day
from shadho_celery.core import columns
from shadho_celery.core.columns import Summary
from shadho_celery.core.records import Action, Answer, AttemptRecord, MoneyPlan, SessionRecord
from shadho_celery.core.trial import FINISHED, Attempt, Outcome, Report, Trial, TrialState, taught
from shadho_celery.errors import LockLost, StoreError, StudyExists, StudyLocked, StudyNotFound
from shadho_celery.program.recorded import list_studies, load_study
from shadho_celery.store import engine as database
from shadho_celery.store.base import StudyRecord, Turn, holder_name
from shadho_celery.store.engine import file_system
from shadho_celery.store.rows import trials
from shadho_celery.store.sql import LOCK_SECONDS, SqlStore

#: losses of a report by name: none, two, one that is finite, and none that is finite
SEVERAL: list[dict[str, float] | None] = [None, {"a": 0.5, "b": -1e300}, {"b": 2.0}, {}]
#: a moment, in seconds since the epoch
NOW = 1_700_000_000.0

#: a scheduler on another machine
ELSEWHERE = "elsewhere 4711 123"

#: runs a command in a pid namespace of its own, as a container does
CONTAINER = ("unshare", "--user", "--map-root-user", "--pid", "--fork", "--mount-proc")

RECORD = StudyRecord(key="k1", name="first", module="tasks.svm", seed=3, space={"x": "uniform(0, 1)"}, created_at=NOW)

PARAMS = {"Kern": 0, "größte Tiefe": 2**40, "学习率": 1e-300, "huge": 1e22, "C": 0.1 + 0.2, "n": -3, "zero": -0.0}

#: two attempts of it live
FULL = Trial(
    number=7,
    subspace="Kern=größte",
    params=PARAMS,
    seed=2**63 - 1,
    state=TrialState.RUNNING,
    attempt=3,
    lost=2,
    compute_class="gpu_large",
    host="knoten-ü",
    asked_at=NOW,
    started_at=NOW + 0.125,
    finished_at=None,
    budget=1 / 3,
    slots=4,
    rung=2,
    origin=3,
    outgrown="cpu,gpu_small",
    outgrown_memory="host,gpu",
    live=(
        Attempt(
            number=7,
            subspace="Kern=größte",
            params=PARAMS,
            seed=2**63 - 1,
            budget=1 / 3,
            slots=4,
            origin=3,
            attempt=2,
            state=TrialState.RUNNING,
            compute_class="cpu",
            host="a\0b",
            started_at=NOW + 0.125,
        ),
    ),
)

#: how it ended
OUTCOME = Outcome(
    state=TrialState.COMPLETE,
    loss=0.1 + 0.2,
    losses={"z error": 0.1 + 0.2, "a größe": -1e300},
    constraints={"memory_gb": 1e-17, "b": -3.5},
    metrics={"z": 1, "a": {"nested": [1, 2.5, None, True, {"ü": "ß"}]}, "1": "str", "tokens": 2**53 + 1},
    error='Traceback: "quoted" 文字 \U0001f600\nsecond line',
    seconds=1e-9,
    memory=3 * 2**30,
    gpu_memory=80 * 2**30,
    warning="a metric was dropped: ü",
    continued=False,
)

ENDED = replace(FULL, state=TrialState.COMPLETE, outcome=OUTCOME, finished_at=NOW + 1, live=None)


def url_of(kind: str, request: pytest.FixtureRequest) -> str:
    """Of an empty store of this kind."""
    if kind == "postgresql":
        return str(request.getfixturevalue("postgres_url"))
    folder = request.getfixturevalue("tmp_path")
    return {"file": f"sqlite:///{folder / 'shadho.db'}", "memory": "sqlite://"}[kind]


@pytest.fixture(params=["file", "memory", "postgresql"])
def url(request: pytest.FixtureRequest) -> str:
    return url_of(request.param, request)


@pytest.fixture(params=["file", "postgresql"])
def shared_url(request: pytest.FixtureRequest) -> str:
    """Of a store that several processes may open, as one in memory cannot be."""
    return url_of(request.param, request)


@pytest.fixture
def store(url: str) -> Iterator[SqlStore]:
    opened = SqlStore(url)
    yield opened
    opened.close()


def record(key: str, **changes: Any) -> StudyRecord:
    fields = {"name": f"study {key}", "module": "tasks.svm", "seed": 0, "space": {}, "created_at": NOW, **changes}
    return StudyRecord(key=key, **fields)


def begun(store: SqlStore, key: str = "k1") -> int:
    """Create a study and take its lock for this process; the fence."""
    store.create(record(key))
    return store.lock(key, holder_name(), NOW)


def trial(number: int, **changes: Any) -> Trial:
    return Trial(number=number, subspace="all", params={"x": number / 7}, **changes)


def ended(running: Trial, state: TrialState = TrialState.COMPLETE, **how: Any) -> Trial:
    """The trial, ended so."""
    how = {"loss": 1.0, **how} if state is TrialState.COMPLETE else how
    return running.evolve(state=state, outcome=Outcome(state=state, **how), finished_at=NOW)


def report(step: int, *, loss: float = 0.5, number: int = 0, attempt: int = 1) -> Report:
    return Report(number=number, attempt=attempt, step=step, loss=loss, at=NOW)


# Studies


def test_a_study_is_found_by_its_name_as_it_was_created(store: SqlStore) -> None:
    space = {"größte Tiefe": "randint(0, 5)", "学习率": "loguniform(-5, 0) if Kern=1"}
    created = record("k1", name="Größe 1 – ω", seed=2**63 - 1, space=space, created_at=NOW + 1 / 3)
    store.create(created)
    assert store.find("Größe 1 – ω") == created


def test_the_latest_study_of_a_module_is_the_youngest_of_that_module(store: SqlStore) -> None:
    store.create(record("old", created_at=NOW))
    store.create(record("young", created_at=NOW + 2))
    store.create(record("middle", created_at=NOW + 1))
    store.create(record("other", module="tasks.mlp", created_at=NOW + 9))
    assert store.latest("tasks.svm").key == "young"
    assert store.latest("tasks.mlp").key == "other"


def test_what_its_command_lines_have_asked_for_is_kept_with_a_study(store: SqlStore) -> None:
    store.create(record("k1"))
    assert (store.find("study k1").settings, store.find("study k1").in_force) == ({}, {})
    fence = store.lock("k1", holder_name(), NOW)
    given, in_force = {"trials": 12, "target": 0.1 + 0.2, "sampler": "tpe"}, {"sampler": "tpe", "policy": "cost"}
    store.record_settings("k1", fence, given, in_force)
    assert (store.find("study k1").settings, store.find("study k1").in_force) == (given, in_force)
    store.record_settings("k1", fence - 1, {"trials": 1}, None)
    assert store.latest("tasks.svm").settings["trials"] == 12
    store.create(record("k2", in_force=in_force))
    assert store.find("study k2").in_force == in_force


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("choices", [{}, {"all": "gp: why"}, None, {}]),
        ("decade", [None, 0.1, None]),
        ("money_plan", [None, MoneyPlan(deadline=NOW, money=3.5, an_hour=0.25), None, MoneyPlan(deadline=NOW)]),
    ],
)
def test_a_fact_is_kept_with_a_turn_of_the_loop_until_it_changes(store: SqlStore, name: str, facts: list[Any]) -> None:
    fence = begun(store)
    kept = facts[0]
    for fact in facts:
        store.write("k1", fence, NOW, Turn(**{name: fact}))
        kept = kept if fact is None else fact
        assert getattr(store.find("study k1"), name) == kept


def test_a_study_may_be_created_with_the_plan_of_its_money(store: SqlStore) -> None:
    """So is a simulated one, which is kept when it has ended."""
    plan = MoneyPlan(deadline=NOW, money=3.5)
    store.create(dataclasses.replace(RECORD, money_plan=plan))
    assert store.find(RECORD.name).money_plan == plan


def test_what_people_have_asked_of_a_study_is_kept_with_a_turn_of_the_loop(store: SqlStore) -> None:
    """A turn that is written again after an outage records it once."""
    store.create(RECORD)
    fence = store.lock("k1", ELSEWHERE, NOW)
    actions = [
        Action(
            id="b" * 32,
            at=NOW,
            by="größe@h",
            action="cancel",
            arguments={"number": 3},
            answer=Answer(is_done=False, text="trial 3 has ended"),
        ),
        Action(id="a" * 32, at=NOW + 1, by="me@h", action="stop", arguments={}, answer=Answer(is_done=True, text="ok")),
    ]
    store.write("k1", fence, NOW, Turn(asked=actions[:1]))
    store.write("k1", fence, NOW, Turn(asked=actions))
    with pytest.raises(LockLost):
        store.write("k1", fence - 1, NOW, Turn(asked=[replace(actions[0], id="c" * 32)]))
    assert store.actions("k1") == actions
    odd = Action(id="c", at=NOW, by="m", action="stop", arguments={}, answer=Answer(is_done=True, text="\0\ud800"))
    store.write("k1", fence, NOW, Turn(asked=[odd]))
    assert [each.answer.text for each in store.actions("k1")][1] == "\ufffd?"
    store.delete("k1", fence)
    assert store.actions("k1") == []


def test_what_a_scheduler_was_asked_is_over_with_it(store: SqlStore) -> None:
    store.create(RECORD)
    fence = store.lock("k1", ELSEWHERE, NOW)

    def asked(*names: str, is_done: bool = True) -> list[Action]:
        answer = Answer(is_done=is_done, text="")
        places = {name: place for place, name in enumerate(names)}
        return [
            Action(id=name, at=NOW + at, by="m", action=name, arguments={}, answer=answer, fence=fence)
            for name, at in places.items()
        ]

    assert store.steered("k1") == []
    store.write("k1", fence, NOW, Turn(asked=asked("pause", "set")))
    store.write("k1", fence, NOW, Turn(asked=asked("stop", is_done=False)))
    assert store.steered("k1") == ["set", "pause"]
    store.unlock("k1", fence)
    assert store.lock("k1", ELSEWHERE, NOW + 1) == store.fence("k1") == fence + 1
    assert store.steered("k1") == []
    assert store.fence("unknown") is None


def test_a_name_that_is_taken_is_refused_with_the_remedy(store: SqlStore) -> None:
    store.create(RECORD)
    with pytest.raises(StudyExists, match=r"'first' .* resume it \(in a program resume=\"if-exists\""):
        store.create(record("k2", name="first"))
    assert store.find("first") == RECORD


def test_what_is_not_there_is_not_found_and_the_message_names_it(store: SqlStore) -> None:
    store.create(RECORD)
    with pytest.raises(StudyNotFound, match="named 'second'"):
        store.find("second")
    with pytest.raises(StudyNotFound, match=r"tasks\.unet"):
        store.latest("tasks.unet")


# The lock


def test_a_held_lock_is_refused_with_the_holders_name(store: SqlStore) -> None:
    store.create(RECORD)
    store.lock("k1", ELSEWHERE, NOW)
    with pytest.raises(StudyLocked, match=r"elsewhere .*4711"):
        store.lock("k1", holder_name(), NOW + LOCK_SECONDS - 1)


def test_a_living_holder_on_this_machine_keeps_its_lock_however_long_it_is_silent(store: SqlStore) -> None:
    begun(store)
    with pytest.raises(StudyLocked, match=str(os.getpid())):
        store.lock("k1", ELSEWHERE, NOW + 100 * LOCK_SECONDS)


def test_a_lock_of_another_machine_is_taken_over_once_it_has_run_out(store: SqlStore) -> None:
    store.create(RECORD)
    first = store.lock("k1", ELSEWHERE, NOW)
    assert store.lock("k1", holder_name(), NOW + LOCK_SECONDS) > first


def test_a_study_whose_lock_has_run_out_without_an_unlocking_is_interrupted(store: SqlStore) -> None:
    store.create(RECORD)
    assert not store.is_interrupted("k1", NOW), "it has never run"
    fence = store.lock("k1", ELSEWHERE, NOW)
    assert not store.is_interrupted("k1", NOW + LOCK_SECONDS - 1)
    assert store.is_interrupted("k1", NOW + LOCK_SECONDS)
    store.unlock("k1", fence)
    assert not store.is_interrupted("k1", NOW + LOCK_SECONDS)


def test_every_write_renews_the_lock(store: SqlStore) -> None:
    store.create(RECORD)
    fence = store.lock("k1", ELSEWHERE, NOW)
    store.write("k1", fence, NOW + LOCK_SECONDS - 1, Turn())
    with pytest.raises(StudyLocked):
        store.lock("k1", holder_name(), NOW + LOCK_SECONDS + 1)


def test_a_dead_holders_lock_is_taken_over_at_once(shared_url: str) -> None:
    """The holder is a real process that took the lock and died without a word."""
    store = SqlStore(shared_url)
    store.create(RECORD)
    code = (
        "import os, sys;"
        "from shadho_celery.store.sql import SqlStore; from shadho_celery.store.base import holder_name;"
        "print(SqlStore(sys.argv[1]).lock('k1', holder_name(), float(sys.argv[2])), flush=True);"
        "os.kill(os.getpid(), 9)"
    )
    holder = [sys.executable, "-c", code, shared_url, str(NOW)]
    done = subprocess.run(holder, capture_output=True, text=True, check=False)
    assert done.returncode == -9, done.stderr
    taken = int(done.stdout)
    assert store.lock("k1", holder_name(), NOW + 1) == taken + 1
    with pytest.raises(LockLost):
        store.write("k1", taken, NOW + 1, Turn(new=[trial(0)]))
    store.close()


def test_a_process_that_got_a_dead_holders_number_does_not_pass_for_it(store: SqlStore) -> None:
    store.create(RECORD)
    host, pid, birth, namespace = holder_name().split(" ")
    store.lock("k1", f"{host} {pid} {int(birth) - 1} {namespace}", NOW)
    assert store.lock("k1", holder_name(), NOW)


@pytest.mark.parametrize(
    "where",
    [" {boot}/7", " 00000000-0000-0000-0000-000000000000/{pids}", " ?", ""],
    ids=["another container", "another boot", "unknown container", "version 0.4"],
)
def test_of_a_holder_in_another_container_with_this_host_name_only_the_expiry_counts(
    store: SqlStore, where: str
) -> None:
    """No process here has its number and its time of start."""
    store.create(RECORD)
    host, _, _, namespace = holder_name().split(" ")
    boot, _, pids = namespace.partition("/")
    first = store.lock("k1", f"{host} 1 4711" + where.format(boot=boot, pids=pids), NOW)
    with pytest.raises(StudyLocked, match=rf"the scheduler on {re.escape(socket.gethostname())} \(process 1\);"):
        store.lock("k1", holder_name(), NOW + LOCK_SECONDS - 1)
    assert store.lock("k1", holder_name(), NOW + LOCK_SECONDS) > first


def test_a_live_scheduler_in_a_container_of_this_host_name_keeps_its_lock(store: SqlStore) -> None:
    if not shutil.which("unshare") or subprocess.run([*CONTAINER, "true"], capture_output=True, check=False).returncode:
        pytest.skip("no pid namespace can be made here")
    store.create(RECORD)
    code = "from shadho_celery.store.base import holder_name; print(holder_name(), flush=True); input()"
    command = [*CONTAINER, sys.executable, "-c", code]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        holder = child.stdout.readline().strip()
        assert holder.split(" ")[0] == socket.gethostname()
        store.lock("k1", holder, NOW)
        with pytest.raises(StudyLocked):
            store.lock("k1", holder_name(), NOW + 1)
        child.communicate("\n")
    assert child.returncode == 0


def test_a_holder_that_died_and_is_not_buried_is_dead(store: SqlStore) -> None:
    """A zombie still has its entry in /proc, because its parent has not waited for it."""
    store.create(RECORD)
    code = "from shadho_celery.store.base import holder_name; print(holder_name(), flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        holder = child.stdout.readline().strip()
        child.stdout.read()
        services.wait_until(lambda: " Z " in Path(f"/proc/{child.pid}/stat").read_text())
        store.lock("k1", holder, NOW)
        assert store.lock("k1", holder_name(), NOW)


def test_of_many_that_lock_at_once_one_gets_it(shared_url: str) -> None:
    store = SqlStore(shared_url)
    store.create(RECORD)
    ready = threading.Barrier(6)
    got: list[object] = []

    def take(number: int) -> None:
        ready.wait()
        try:
            got.append(store.lock("k1", f"host{number} 1 1", NOW))
        except StudyLocked as error:
            got.append(error)

    threads = [threading.Thread(target=take, args=(number,)) for number in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 6
    assert [answer for answer in got if not isinstance(answer, StudyLocked)] == [1]
    store.close()


def test_a_study_given_back_can_be_taken_and_its_fences_only_grow(store: SqlStore) -> None:
    first = begun(store)
    store.unlock("k1", first)
    second = store.lock("k1", ELSEWHERE, NOW)
    assert second > first
    store.unlock("k1", first)
    with pytest.raises(StudyLocked):
        store.lock("k1", holder_name(), NOW)


def test_an_old_fence_writes_nothing(store: SqlStore) -> None:
    store.create(RECORD)
    old = store.lock("k1", ELSEWHERE, NOW)
    store.write("k1", old, NOW, Turn(new=[trial(0, state=TrialState.RUNNING, attempt=1)]))
    kept = list(store.trials("k1"))
    new = store.lock("k1", holder_name(), NOW + 2 * LOCK_SECONDS)
    end = ended(kept[0])
    with pytest.raises(LockLost):
        store.write("k1", old, NOW, Turn(new=[trial(1)], changed=[end], reported=[report(1)]))
    assert list(store.trials("k1")) == kept
    assert store.reports("k1") == []
    store.write("k1", new, NOW, Turn(changed=[end]))
    assert list(store.trials("k1")) == [end]


# Trials


@pytest.mark.parametrize("written", [FULL, ENDED], ids=["running", "ended"])
def test_a_trial_comes_back_as_it_was_written_types_and_order_included(store: SqlStore, written: Trial) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(new=[written]))
    [back] = store.trials("k1")
    assert back == written
    assert repr(back.params) == repr(written.params)
    assert repr(back.outcome.metrics) == repr(written.outcome.metrics)


def test_earlier_trials_are_whole_while_they_run_and_summaries_once_they_have_ended(store: SqlStore) -> None:
    fence = begun(store)
    failed = trial(9, state=TrialState.FAILED, outcome=Outcome(state=TrialState.FAILED, error="no"), lost=1)
    store.write("k1", fence, NOW, Turn(new=[trial(3), FULL, replace(ENDED, number=8), failed]))
    whole = {each.number: each for each in store.trials("k1")}
    *running, first, last = store.earlier("k1")
    assert running == [whole[3], whole[7]]
    summaries = [first, last]
    assert [each.number for each in summaries] == [8, 9]
    for summary in summaries:
        assert isinstance(summary, Summary)
        of_trial = attrgetter(*map(columns.of_trial, columns.KEPT))
        assert attrgetter(*columns.KEPT)(summary) == of_trial(whole[summary.number])


@pytest.mark.parametrize("changed", [FULL, ENDED], ids=["running", "ended"])
def test_a_change_comes_back_with_every_field(store: SqlStore, changed: Trial) -> None:
    fence = begun(store)
    store.write(
        "k1", fence, NOW, Turn(new=[Trial(number=7, subspace=FULL.subspace, params=FULL.params, seed=FULL.seed)])
    )
    store.write("k1", fence, NOW, Turn(changed=[replace(changed, asked_at=None)]))
    assert list(store.trials("k1")) == [replace(changed, asked_at=None)]


@pytest.mark.parametrize("state", sorted(FINISHED))
def test_a_finished_trial_keeps_its_first_result(store: SqlStore, state: TrialState) -> None:
    fence = begun(store)
    running = trial(0, state=TrialState.RUNNING, attempt=1)
    end = ended(running, state)
    store.write("k1", fence, NOW, Turn(new=[running]))
    store.write("k1", fence, NOW, Turn(changed=[end]))
    late = replace(ended(running, loss=0.0), attempt=2, finished_at=NOW + 1)
    store.write("k1", fence, NOW, Turn(changed=[late, running]))
    assert list(store.trials("k1")) == [end]


@pytest.mark.parametrize("end", [FULL, ENDED], ids=["running", "ended"])
def test_a_trial_whose_row_was_deleted_is_written_again_whole_and_named(store: SqlStore, end: Trial) -> None:
    fence = begun(store)
    done = ended(trial(1))
    store.write("k1", fence, NOW, Turn(new=[replace(FULL, attempt=1, live=None), trial(0), trial(1)]))
    store.write("k1", fence, NOW, Turn(changed=[done]))
    with store._begin() as connection:
        connection.execute(sa.delete(trials).where(trials.c.number.in_([0, 7])))
    late = replace(done, finished_at=NOW + 9)
    assert sorted(store.write("k1", fence, NOW, Turn(changed=[trial(0, attempt=2), late, end]))) == [0, 7]
    assert list(store.trials("k1")) == [trial(0, attempt=2), done, end]
    assert not store.write("k1", fence, NOW, Turn(changed=[late, end])), "what has ended was not deleted"


def test_the_best_trial_is_feasible_then_of_the_highest_budget_then_of_the_least_loss(store: SqlStore) -> None:
    """Of those that break a constraint it is the nearest. No budget is all of the fidelity."""
    fence = begun(store)
    facts = [(1.0, 3.0, None), (5.0, 0.5, None), (2.0, 0.5, None), (9.0, -1.0, 1.0), (8.0, None, 1.0)]
    facts += [(9.5, None, 9.0), (9.4, None, 9.0), (9.6, None, None)]
    for number, (loss, over, budget) in enumerate(facts):
        outcome = Outcome(
            state=TrialState.COMPLETE, loss=loss, constraints={} if over is None else {"memory_gb": over, "ms": -1.0}
        )
        made = trial(number, state=outcome.state, outcome=outcome, finished_at=NOW, budget=budget)
        store.write("k1", fence, NOW, Turn(new=[made, replace(made, number=100 + number)]))
        assert store.best("k1") == number


def test_trials_come_in_the_order_of_their_numbers(store: SqlStore) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(new=[trial(number) for number in (10, 2, 0)]))
    store.write("k1", fence, NOW, Turn(new=[trial(1)]))
    assert [t.number for t in store.trials("k1")] == [0, 1, 2, 10]


def test_text_that_no_database_can_hold_costs_characters_and_not_the_study(store: SqlStore) -> None:
    """A trial's last words may be any bytes: NUL, and halves of surrogate pairs."""
    fence = begun(store)
    words = "before\x00\ud800after"
    running = trial(0, host="h\x00")
    broken = ended(running, TrialState.FAILED, error=words, warning=words, metrics={"out\x00": words})
    store.write("k1", fence, NOW, Turn(new=[running, replace(broken, number=1)]))
    store.write("k1", fence, NOW, Turn(changed=[broken]))
    for back in store.trials("k1"):
        for text in (back.outcome.error, back.outcome.warning):
            assert text is not None
            assert text.startswith("before")
            assert text.endswith("after")
        assert list(back.outcome.metrics)


def test_a_turn_is_written_whole_or_not_at_all(store: SqlStore) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(new=[trial(0)]))
    with pytest.raises(Exception, match=r"(?i)unique"):
        store.write("k1", fence, NOW, Turn(new=[trial(1), trial(0)], reported=[report(1)]))
    assert [t.number for t in store.trials("k1")] == [0]
    assert store.reports("k1") == []


def test_two_studies_do_not_see_each_other(store: SqlStore) -> None:
    one, two = begun(store, "k1"), begun(store, "k2")
    store.write("k1", one, NOW, Turn(new=[trial(0, seed=1)], reported=[report(1, loss=0.1)]))
    store.write("k2", two, NOW, Turn(new=[trial(0, seed=2), trial(1)], reported=[report(1, loss=0.2)]))
    store.write("k1", one, NOW, Turn(changed=[ended(trial(0), TrialState.FAILED)]))
    assert [(t.number, t.seed, t.state) for t in store.trials("k1")] == [(0, 1, "FAILED")]
    assert [(t.number, t.seed, t.state) for t in store.trials("k2")] == [(0, 2, "WAITING"), (1, 0, "WAITING")]
    assert [r.loss for r in store.reports("k1")] == [0.1]
    assert [r.loss for r in store.reports("k2")] == [0.2]


# Reports


def test_a_report_that_comes_twice_is_kept_once_as_it_came_first(store: SqlStore) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(reported=[report(1), report(1)]))
    store.write("k1", fence, NOW, Turn(reported=[report(1, loss=9.0), report(2)]))
    assert store.reports("k1") == [report(1), report(2)]


def test_reports_come_by_trial_attempt_and_step(store: SqlStore) -> None:
    fence = begun(store)
    mixed = [
        report(2),
        report(1, number=1),
        report(10),
        report(1, attempt=2),
        report(0),
    ]
    store.write("k1", fence, NOW, Turn(reported=mixed))
    places = [(r.number, r.attempt, r.step) for r in store.reports("k1")]
    assert places == [(0, 1, 0), (0, 1, 2), (0, 1, 10), (0, 2, 1), (1, 1, 1)]


@pytest.mark.parametrize("loss", [float("inf"), float("nan"), -1e300])
def test_a_diverging_trials_reports_are_kept(store: SqlStore, loss: float) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(reported=[report(1, loss=loss)]))
    assert [repr(r.loss) for r in store.reports("k1")] == [repr(loss)]


def test_several_losses_of_a_report_are_kept_by_name(store: SqlStore) -> None:
    """A report without finite losses differs from a report of one loss."""
    fence, reports = begun(store), [replace(report(step), losses=losses) for step, losses in enumerate(SEVERAL)]
    store.write("k1", fence, NOW, Turn(reported=reports))
    assert store.reports("k1") == reports


def test_reports_are_read_from_tables_without_losses_and_a_writer_adds_the_column(shared_url: str) -> None:
    """An earlier version has created such tables."""
    with closing(SqlStore(shared_url)) as store:
        store.write("k1", begun(store), NOW, Turn(reported=[report(1)]))
        store.unlock("k1", 1)
    engine = database.make_engine(shared_url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE reports DROP COLUMN losses"))
    engine.dispose()
    with closing(SqlStore(shared_url, read_only=True)) as store:
        assert store.reports("k1") == store.reports("k1", [0]) == [report(1)]
    with closing(SqlStore(shared_url)) as store:
        more = replace(report(2), losses={"a": 0.5})
        store.write("k1", store.lock("k1", "here 1 2", NOW), NOW, Turn(reported=[more]))
        assert store.reports("k1") == [report(1), more]


def test_what_all_studies_have_used_is_counted_between_two_times(shared_url: str) -> None:
    """Attempts that began before count from that time, and those that ended later until its end. A store of an earlier
    version has no owners.
    """
    hour = 3600.0
    since = NOW - 10 * hour
    begins = {1: (since - hour, since + hour), 2: (NOW - 2 * hour, NOW), 3: (since - hour, since), 4: (NOW, None)}
    attempts = [
        AttemptRecord(
            number=number, attempt=1, compute_class="gpu", started_at=begin, ended_at=end, price=6.0, owner="anna"
        )
        for number, (begin, end) in begins.items()
    ]
    attempts.append(replace(attempts[1], attempt=2, compute_class="cpu", price=None, owner=None))
    seen = [SessionRecord(worker="w", since=since, compute_class="gpu", host="h", slots=3)]
    old = [SessionRecord(worker="w", since=1.0, until=2.0, compute_class="gpu", host="h", slots=3)]
    with closing(SqlStore(shared_url)) as store:
        for key, sessions in {"k1": seen, "k2": old}.items():
            new = [trial(number, slots=3) for number in begins]
            store.write(key, begun(store, key), NOW, Turn(new=new, attempted=attempts, seen=sessions))
        names = {each.key: each.name for each in store.records()}
        assert [[*each.values()] for each in store.used(since)] == [
            ["", names["k1"], "cpu", pytest.approx(2 * 3 * hour), 0.0],
            ["anna", names["k1"], "gpu", pytest.approx(3 * 3 * hour), pytest.approx(18.0)],
        ]
        assert [[*each.values()][3:] for each in store.used(since - hour / 2, since + hour / 2)] == [
            [pytest.approx((1 + 0.5) * 3 * hour), pytest.approx(9.0)]
        ]
    engine = database.make_engine(shared_url)
    with engine.begin() as connection:
        connection.execute(sa.text("ALTER TABLE attempts DROP COLUMN owner"))
    engine.dispose()
    with closing(SqlStore(shared_url, read_only=True)) as store:
        assert [each["owner"] for each in store.used(since)] == ["", ""]


def test_busy_slots_of_a_day_are_summed_by_quarters_of_an_hour(shared_url: str) -> None:
    """A worker that two studies have recorded counts once, what has no end goes on while its scheduler may run, and
    wide trials take several slots.
    """
    hour = 3600.0
    ends = {1: (NOW - 3 * hour, NOW - 1.5 * hour), 2: (NOW - 30 * hour, NOW - 23 * hour), 3: (NOW - 0.1 * hour, None)}
    ends |= {4: (NOW - 30 * hour, NOW - 25 * hour), 5: (None, None), 6: (NOW - 600.0, NOW - 540.0)}
    attempts = [
        AttemptRecord(number=number, attempt=1, compute_class="gpu", started_at=begin, ended_at=end)
        for number, (begin, end) in ends.items()
    ]
    lasts = SessionRecord(worker="w", since=NOW - 30 * hour, compute_class="gpu", host="h", slots=4)
    again = replace(lasts, since=NOW - 4 * hour, until=NOW - 2 * hour)
    other = SessionRecord(worker="v", since=NOW - hour, until=NOW, compute_class="cpu", host="h", slots=1)
    with closing(SqlStore(shared_url)) as store:
        assert day(store, NOW).empty
        for key, seen in {"k1": [lasts], "k2": [again, other]}.items():
            new = [trial(number, slots=2) for number in ends] if key == "k1" else []
            told = attempts if key == "k1" else []
            store.write(key, begun(store, key), NOW, Turn(new=new, attempted=told, seen=seen))
        chart = day(store, NOW)
        later = day(store, NOW + 10 * hour)
    assert chart.axes[1].categories == ["cpu", "gpu"]
    [cpu, gpu, idle] = chart.series
    assert cpu.columns["busy"] == [0.0, 0.0], "only the ends of the day"
    shares = dict(zip(gpu.columns["start"], gpu.columns["busy"], strict=True))
    assert (min(gpu.columns["start"]), max(gpu.columns["end"])) == (NOW - 24 * hour, NOW), "the axis has the whole day"
    quarter = hour / 4
    assert shares == pytest.approx(
        {NOW - 24 * hour + quarter * part: 0.5 for part in range(4)}
        | {NOW - 3 * hour + quarter * part: 0.5 for part in range(6)}
        | {NOW - quarter: 0.5 * (360 + 60) / 900}
    )
    assert idle.columns["class"] == ["cpu", "gpu"]
    assert idle.columns["idle"] == pytest.approx([1.0, 1.0 - 0.5 * (1 + 1.5 + 0.1 + 1 / 60) / 24])
    assert chart.title == "Busy slots in the last day: 0 % in cpu, 5 % in gpu"
    known = 14 * hour + LOCK_SECONDS
    _, gone = later.series[-1].columns["idle"]
    assert gone == pytest.approx(1.0 - 0.5 * (1.5 * hour + 0.1 * hour + LOCK_SECONDS + 60) / known), "of a lost lock"


def test_owners_are_read_from_tables_without_them_and_a_writer_adds_the_columns(shared_url: str) -> None:
    """An earlier version has created such tables: what it has recorded has no owner."""
    attempt = AttemptRecord(number=1, attempt=1, owner="anna")
    with closing(SqlStore(shared_url)) as store:
        store.write("k1", begun(store), NOW, Turn(attempted=[attempt]))
        store.unlock("k1", 1)
    engine = database.make_engine(shared_url)
    with engine.begin() as connection:
        for table in ("studies", "attempts"):
            connection.execute(sa.text(f"ALTER TABLE {table} DROP COLUMN owner"))
    engine.dispose()
    with closing(SqlStore(shared_url, read_only=True)) as store:
        assert [each.owner for each in store.records()] == [None]
        assert [*store.attempts("k1")] == [replace(attempt, owner=None)]
        assert [*store.rows_of_attempts("k1", ["number", "owner"])] == [[(1, None)]]
        assert store.used(0.0) == []
    with closing(SqlStore(shared_url)) as store:
        later = replace(attempt, attempt=2)
        store.write("k1", store.lock("k1", "here 1 2", NOW), NOW, Turn(attempted=[later]))
        assert [*store.attempts("k1")] == [replace(attempt, owner=None), later]


def test_a_step_may_count_tokens(store: SqlStore) -> None:
    fence = begun(store)
    store.write("k1", fence, NOW, Turn(reported=[report(2**40)]))
    assert store.reports("k1") == [report(2**40)]


# A database of an earlier version


@pytest.mark.parametrize("read_only", [False, True])
def test_a_database_of_an_earlier_version_is_refused_in_one_line_and_nothing_is_written(
    shared_url: str, read_only: bool
) -> None:
    with closing(SqlStore(shared_url)) as store:
        begun(store)
    engine = database.make_engine(shared_url)
    with engine.begin() as connection:
        connection.execute(sa.text("DROP TABLE schema_version"))

    def content() -> list[Any]:
        with engine.connect() as connection:
            tables = sorted(sa.inspect(connection).get_table_names())
            return [(name, connection.execute(sa.text(f"SELECT * FROM {name}")).mappings().all()) for name in tables]

    before = content()
    with pytest.raises(StoreError, match="an earlier version, or another program, has written it; give --store"):
        SqlStore(shared_url, read_only=read_only)
    assert content() == before
    engine.dispose()


def test_an_earlier_version_can_still_write_to_a_database_of_this_one(shared_url: str) -> None:
    """A scheduler that was started before goes on: it names the columns it knows."""
    store = SqlStore(shared_url)
    begun(store)
    engine = database.make_engine(shared_url)
    values = {"study": "k1", "number": 0, "subspace": "all", "params": "{}", "seed": 0, "state": "WAITING"}
    values |= {"attempt": 0, "lost": 0, "slots": 1, "metrics": "{}"}
    names = ", ".join(values)
    with engine.begin() as connection:
        places = ", ".join(f":{name}" for name in values)
        connection.execute(sa.text(f"INSERT INTO trials ({names}) VALUES ({places})"), values)
    engine.dispose()
    assert list(store.trials("k1")) == [Trial(number=0, subspace="all", params={})]
    store.close()


# One line for what goes wrong


def refusal(url: str) -> str:
    """Return the error of a store that cannot be opened: one line that names the remedy."""
    with pytest.raises(StoreError) as caught:
        SqlStore(url)
    message = str(caught.value)
    assert "\n" not in message
    return message


def test_a_name_that_is_no_unicode_text_is_that_of_no_study(store: SqlStore) -> None:
    """The arguments of a command may have any bytes."""
    with pytest.raises(StudyNotFound, match="no study named"):
        store.find("\udcff")


def test_a_password_is_hidden_wherever_the_store_is_named(postgres_url: str) -> None:
    user, _, rest = postgres_url.partition("@")
    with_password = f"{user.rpartition(':')[0] if user.count(':') > 1 else user}:secret%40word@{rest}"
    store = SqlStore(with_password)
    assert "***" in store.safe_url
    store.create(RECORD)
    with pytest.raises(StudyExists) as exists:
        store.create(RECORD)
    with pytest.raises(StudyNotFound) as missing:
        store.find("none")
    store.close()
    for text in (store.safe_url, str(exists.value), str(missing.value)):
        assert "secret" not in text


@pytest.mark.parametrize(
    "url",
    [
        "postgresql://me:secret@127.0.0.1:1/none",
        "postgresql+psycopg://me:secret@127.0.0.1:1/none",
        "postgresql://me:secret@127.0.0.1:port/none",
        "postgresql:/me:secret@127.0.0.1/none",
        "mysql://me:secret@127.0.0.1/none",
        "postgresql+nodriver://me:secret@127.0.0.1/none",
    ],
)
def test_a_store_that_cannot_be_used_is_one_line_without_its_password(url: str) -> None:
    assert "secret" not in refusal(url)


@pytest.mark.parametrize("url", ["", "shadho.db", "mysql://me@host/db", "://"])
def test_what_is_no_database_url_is_refused_with_an_example(url: str) -> None:
    assert "sqlite:///" in refusal(url)


def test_a_folder_that_does_not_exist_is_named(tmp_path: Path) -> None:
    message = refusal(f"sqlite:///{tmp_path}/missing/shadho.db")
    assert "missing/shadho.db" in message
    assert "(store)" in message


def test_a_folder_in_the_way_is_named(tmp_path: Path) -> None:
    assert str(tmp_path) in refusal(f"sqlite:///{tmp_path}")


def test_a_folder_that_cannot_be_written_is_named() -> None:
    """/proc is one that root cannot write either."""
    message = refusal("sqlite:////proc/shadho.db")
    assert "/proc/shadho.db" in message
    assert "(store)" in message


def test_a_file_that_is_no_database_is_named(tmp_path: Path) -> None:
    path = tmp_path / "notes.txt"
    path.write_text("not a database\n" * 100)
    assert "notes.txt" in refusal(f"sqlite:///{path}")
    assert path.read_text().startswith("not a database")


# SQLite's files


def test_only_its_owner_can_read_the_file_whatever_the_umask(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        store = SqlStore(f"sqlite:///{tmp_path / 'shadho.db'}")
        begun(store)
        modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in tmp_path.iterdir()}
        store.close()
    finally:
        os.umask(before)
    assert modes["shadho.db"] == 0o600
    assert set(modes.values()) == {0o600}


def test_others_read_while_the_scheduler_writes(tmp_path: Path) -> None:
    """The journal is a write-ahead log."""
    path = tmp_path / "shadho.db"
    store = SqlStore(f"sqlite:///{path}")
    fence = begun(store)
    with sqlite3.connect(path) as reader:
        assert reader.execute("PRAGMA journal_mode").fetchone() == ("wal",)
        reader.execute("BEGIN")
        assert reader.execute("SELECT count(*) FROM trials").fetchone() == (0,)
        store.write("k1", fence, NOW, Turn(new=[trial(0)]))
        assert reader.execute("SELECT count(*) FROM trials").fetchone() == (0,)
    assert reader.execute("SELECT count(*) FROM trials").fetchone() == (1,)
    reader.close()
    store.close()


MOUNTS = r"""/dev/sda1 / ext4 rw 0 0
server:/home /home nfs4 rw 0 0
/dev/sdb1 /home/me/local xfs rw 0 0
server:/our\040data /mnt/our\040data cifs rw 0 0
me@host:/ /mnt/ssh fuse.sshfs rw 0 0
"""


@pytest.mark.parametrize(
    ("path", "kind"),
    [
        ("/var/shadho.db", "ext4"),
        ("/home/me/shadho.db", "nfs4"),
        ("/home/me/local/shadho.db", "xfs"),
        ("/homework/shadho.db", "ext4"),
        ("/mnt/our data/shadho.db", "cifs"),
        ("/mnt/ssh/shadho.db", "fuse.sshfs"),
    ],
)
def test_the_file_system_is_that_of_the_innermost_mount(tmp_path: Path, path: str, kind: str) -> None:
    mounts = tmp_path / "mounts"
    mounts.write_text(MOUNTS)
    assert file_system(Path(path), mounts) == kind


def test_where_the_system_does_not_tell_the_file_system_is_unknown(tmp_path: Path) -> None:
    assert file_system(tmp_path, tmp_path / "no-mounts") == ""


@pytest.mark.parametrize("kind", ["nfs4", "cifs", "fuse.sshfs", "lustre"])
def test_a_network_file_system_is_refused_and_nothing_is_created_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(database, "file_system", lambda path: kind)
    message = refusal(f"sqlite:///{tmp_path}/shadho.db")
    assert kind in message
    assert "give a store on another disk" in message
    assert not list(tmp_path.iterdir())


# Reading a study that may run


def test_a_study_is_read_without_its_lock_and_by_a_shortened_name(shared_url: str) -> None:
    with closing(SqlStore(shared_url)) as store:
        fence = begun(store)
        new = [Trial(number=n, subspace="all", params={"x": 0.5}, asked_at=NOW) for n in range(3)]
        store.write("k1", fence, NOW, Turn(new=new))
        best = Outcome(state=TrialState.COMPLETE, loss=0.25, metrics={"a": [1]})
        ended = new[1].evolve(state=TrialState.COMPLETE, outcome=best, host="node", finished_at=NOW)
        store.write(
            "k1", fence, NOW, Turn(changed=[ended], reported=[Report(number=1, attempt=1, step=2, loss=0.5, at=NOW)])
        )
        study = load_study(shared_url, "study k")
        assert (study.name, study.running_on is not None) == ("study k1", True)
        assert study.counts == {TrialState.WAITING: 2, TrialState.COMPLETE: 1}
        assert study.best is not None
        assert (study.best.number, study.best.loss, study.best.metrics) == (1, 0.25, {"a": [1]})
        assert [report.step for report in study.best.reports] == [2]
        store.write("k1", fence, NOW, Turn(new=[Trial(number=3, subspace="all", params={}, asked_at=NOW)]))
        assert len(study.trials) == 4
        with pytest.raises(StudyLocked):
            study.delete()
        store.unlock("k1", fence)
        assert study.delete().hosts == ["node"]
        assert list_studies(shared_url) == []
        assert (list(store.trials("k1")), store.reports("k1")) == ([], [])


def test_a_reader_changes_nothing(shared_url: str) -> None:
    with closing(SqlStore(shared_url)) as store:
        begun(store)
    with closing(SqlStore(shared_url, read_only=True)) as reader:
        with pytest.raises((StoreError, sa.exc.InternalError)):
            reader.create(record("k2"))
        assert [found.key for found in reader.records()] == ["k1"]
        assert not reader.is_in_memory


def test_a_server_without_the_name_of_a_database_is_not_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SqlStore, "_create_tables", lambda store: None)
    assert not SqlStore("postgresql://user@localhost").is_in_memory
    assert all(SqlStore(url).is_in_memory for url in ("sqlite://", "sqlite:///:memory:"))


def test_the_trials_that_teach_a_study_are_kept_apart_from_its_own_and_deleted_with_it(store: SqlStore) -> None:
    known = [taught(place, "all", {"x": place / 7, "größe": "ω"}, 0.1 + place) for place in range(3)]
    known.append(taught(3, "all", {"x": 1.0}, 2.0, losses={"b": 2.0, "a": -1.0}, constraints={"size": 3.0}))
    store.create(record("k1"), known)
    store.create(record("k2"))
    assert [*store.warm_start("k1")[3].outcome.losses] == ["b", "a"]
    assert store.warm_start("k1") == known
    assert store.warm_start("k2") == []
    assert ([*store.numbers("k1")], store.best("k1")) == ([], None)
    store.delete("k1", store.lock("k1", holder_name(), NOW))
    assert store.warm_start("k1") == []
