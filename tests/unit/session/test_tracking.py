"""Each ended trial is shown in a tracker once, whatever the tracker does, and the study does not notice."""

from __future__ import annotations

import errno
import os
import threading
from collections import Counter
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hyperopt import hp
from services.cases import cases
from services.extras import needed

from shadho_celery.core.settings import StudySettings
from shadho_celery.core.system import ManualClock
from shadho_celery.errors import UsageError
from shadho_celery.program.study import Study
from shadho_celery.results.study import StudyResults
from shadho_celery.session import tracking
from shadho_celery.session.tracking import EndedTrial, Follower, Trackers, chosen
from shadho_celery.store.sql import SqlStore

SPACE = hp.choice("kind", [{"kind": "plain", "x": hp.uniform("x", 0, 1)}, ("pair", hp.uniform("\x1b[31my", 1, 2))])


def objective(params: Any, context: Any) -> dict[str, Any]:
    for step in (1, 2, 3):
        context.report(step, float("nan") if step == 2 else step)
    if context.trial == 4:
        raise ValueError("no\x1b[2J luck")
    return {"loss": 0.5, "metric": 3, "text": "t", "huge": 10**400, "constraints": {"size": -1}}


class Tool:
    """A tool with a tracker, which fails as told; it keeps what it shows after its tracker is gone."""

    def __init__(self) -> None:
        self.shown: list[EndedTrial] = []
        self.opened = 0
        #: raised by each call that shows a trial with one of these numbers
        self.error: Exception | None = None
        self.refused: Any = range(10**9)

    def tracker(self, study: str, key: str, uri: str) -> Tool:
        self.opened += 1
        self.known = [trial.number for trial in self.shown]
        if isinstance(self.error, UsageError):
            raise self.error
        return self

    def log(self, trial: EndedTrial) -> None:
        if self.error is not None and trial.number in self.refused:
            raise self.error
        self.shown.append(trial)

    @property
    def numbers(self) -> list[int]:
        return [trial.number for trial in self.shown]


class Case:
    """A recorded study, a tool and a clock."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.url = f"sqlite:///{folder / 'shadho.db'}"
        self.tool, self.clock, self.told = Tool(), ManualClock(100.0), list[str]()
        monkeypatch.setattr(tracking, "named", lambda place: self.tool.tracker)
        monkeypatch.setattr(tracking, "time", SimpleNamespace(monotonic=self.clock.now))
        self.run(6)

    def run(self, trials: int) -> None:
        with Study(SPACE, store=self.url, study="mine", resume="if-exists", sampler="random", seed=1) as study:
            study.run(objective, trials=trials)

    def follower(self, study: str = "mine") -> Follower:
        store = SqlStore(self.url, read_only=True)
        return Follower("mlflow", "", lambda: StudyResults(store, store.find(study)), self.told.append)


@pytest.fixture
def case(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Case:
    monkeypatch.chdir(tmp_path)
    return Case(tmp_path, monkeypatch)


def test_an_ended_trial_is_shown_with_all_that_is_known_of_it(case: Case) -> None:
    case.follower().turn()
    assert case.tool.numbers == [*range(6)]
    first, failed = case.tool.shown[0], case.tool.shown[4]
    assert {frozenset(trial.params) for trial in case.tool.shown} == {
        frozenset({"kind", "x"}),
        frozenset({"kind", "\\x1b[31my"}),
    }
    assert {trial.params["kind"] for trial in case.tool.shown} <= {"plain", "pair"}
    *reports, (last, finished_at, metrics) = first.points
    assert metrics == {"loss": 0.5, "metric": 3.0, "constraint.size": -1.0}
    assert [step for step, _, _ in reports] == [1, 2, last] == [1, 2, 3]
    assert reports[0][2] == {"loss": 1.0}
    assert first.facts["state"] == "COMPLETE"
    assert first.facts["user"]
    assert 0 < first.started_at <= finished_at
    assert failed.facts["state"] == "FAILED"
    assert failed.facts["error"].strip().endswith("ValueError: no\\x1b[2J luck")
    assert len({trial.id for trial in case.tool.shown}) == 6


def test_a_maximised_loss_is_shown_as_the_objective_returned_it(case: Case) -> None:
    space, way = {"x": hp.uniform("x", 0, 1)}, {"direction": "maximize"}
    with Study(space, store=case.url, study="most", **way) as study:
        study.run(lambda params, context: context.report(1, 2.0) or 7.0, trials=1)
    case.follower("most").turn()
    [trial] = case.tool.shown
    assert [numbers for _, _, numbers in trial.points] == [{"loss": 2.0}, {"loss": 7.0}]


def test_only_trials_that_have_ended_are_shown_each_once(case: Case) -> None:
    follower = case.follower()
    follower.turn()
    with Study(SPACE, store=case.url, study="mine", resume=True) as study:
        asked = [study.ask() for _ in range(3)]
        follower.turn()
        assert len(case.tool.shown) == 6
        study.tell(asked[1], 1.0)
        follower.turn()
        assert case.tool.numbers == [*range(6), asked[1].number]
    follower.turn()
    assert max(Counter(case.tool.numbers).values()) == 1
    assert case.told == []


def test_a_resumed_study_adds_only_what_the_tool_lacks(case: Case) -> None:
    case.follower().turn()
    del case.tool.shown[2]
    case.run(8)
    case.follower().turn()
    assert sorted(case.tool.numbers) == [*range(8)]


def test_a_tracker_that_is_away_is_warned_of_once_and_catches_up(case: Case) -> None:
    follower = case.follower()
    case.tool.error = ConnectionError("no route to http://me:secret@host/ \x1b[2J")
    pauses = []
    for _ in range(9):
        follower.turn()
        pauses.append(follower.pause)
        case.clock.sleep(follower.pause)
    assert pauses == [2, 4, 8, 16, 32, 60, 60, 60, 60]
    [line] = case.told
    assert line == (
        "Warning: mlflow takes no trials: ConnectionError: no route to http://***@host/ \\x1b[2J; trying again"
    )
    assert case.tool.opened == 9
    case.tool.error = None
    case.run(9)
    follower.turn()
    assert sorted(case.tool.numbers) == [*range(9)]
    assert follower.pause == 1
    assert follower.lacking == {}
    follower.turn()
    assert case.told[1:] == ["mlflow answers again, after 296 s"]


@cases("error", [OSError(errno.ENOSPC, "No space left on device"), RuntimeError(""), KeyError("x")])
def test_a_trial_that_the_tracker_refuses_does_not_keep_back_the_others(
    error: Exception, tmp_path_factory: pytest.TempPathFactory
) -> None:
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("refused")
        monkeypatch.chdir(folder)
        case = Case(folder, monkeypatch)
        case.tool.error, case.tool.refused = error, [2]
        follower, has_ended = case.follower(), threading.Event()
        has_ended.set()
        follower.run(has_ended)
        assert sorted(case.tool.numbers) == [0, 1, 3, 4, 5]
        assert [*follower.lacking] == [2]
        assert case.told[0].startswith(f"Warning: mlflow takes no trials: {type(error).__name__}:")
        assert len(case.told) == 1


def test_a_tool_that_has_another_study_of_this_name_is_left_alone(case: Case) -> None:
    case.tool.error = UsageError("the tool has another study mine")
    follower, has_ended = case.follower(), threading.Event()
    has_ended.set()
    follower.run(has_ended)
    assert case.told == ["Warning: mlflow takes no trials: UsageError: the tool has another study mine; trying again"]
    assert case.tool.shown == []
    assert len(follower.lacking) == 6


def test_no_trial_is_read_again(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    read = list[int]()
    trials = SqlStore.trials
    monkeypatch.setattr(
        SqlStore, "trials", lambda self, key, numbers: read.extend(numbers) or trials(self, key, numbers)
    )
    follower = case.follower()
    follower.turn()
    follower.turn()
    assert sorted(read) == [*range(6)]


REFUSED = {
    "mlfow": "there is no tracker 'mlfow'; did you mean mlflow? choose one of mlflow, wandb, tensorboard, none",
    "mlflow:a,mlflow:b": "track is 'mlflow:a,mlflow:b'; name each tracker once, or none alone",
    "mlflow:http://me:secret@host": "track: settings are not secret; give mlflow its password in the environment",
    "mlflow:http://token@host": "track: settings are not secret; give mlflow its password in the environment",
}


@cases("given, message", REFUSED.items())
def test_an_invalid_tracker_is_refused_in_one_line_without_its_password(given: str, message: str) -> None:
    with pytest.raises(UsageError) as caught:
        Study({"x": hp.uniform("x", 0, 1)}, track=given, store="sqlite:///never.db")
    assert str(caught.value) == message
    assert not Path("never.db").exists()


def test_a_tracker_whose_extra_is_missing_is_refused_with_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(tracking, "find_spec", lambda name: None)
    with pytest.raises(
        UsageError, match=r'^track wandb needs the extra wandb; in the checkout: pip install -e "\.\[wandb'
    ):
        Study({"x": hp.uniform("x", 0, 1)}, track="wandb", store="sqlite:///never.db")
    assert not Path("never.db").exists()


def test_a_folder_of_the_name_of_a_library_is_not_the_library(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "untracked").mkdir()
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(tracking, "TRACKERS", {"untracked": ""})
    with pytest.raises(UsageError, match="needs the extra untracked"):
        chosen(StudySettings(track="untracked"), "sqlite:///a.db")


def test_a_store_in_memory_cannot_be_tracked(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: SimpleNamespace(origin=""))
    with pytest.raises(UsageError, match="track needs a store outside of this process"):
        Study({"x": hp.uniform("x", 0, 1)}, track="wandb")


def test_several_trackers_and_none_are_told_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tracking, "find_spec", lambda name: SimpleNamespace(origin=""))
    given = "mlflow:sqlite:///m.db, wandb:me/mine,tensorboard"
    expected = {"mlflow": "sqlite:///m.db", "wandb": "me/mine", "tensorboard": ""}
    assert chosen(StudySettings(track=given), "sqlite:///a.db") == expected
    assert chosen(StudySettings(track="none"), "sqlite://") == chosen(StudySettings(), "sqlite://") == {}


def test_the_process_shows_the_last_trials_although_a_forked_process_keeps_its_pipe_open(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither does a module in the working directory hide this package or a library from the process."""
    needed("tensorboard")
    monkeypatch.chdir(tmp_path)
    for name in ("shadho_celery", "tensorboard"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "__init__.py").write_text("raise ImportError")
    with Study(SPACE, store="sqlite:///shadho.db", study="mine", track="tensorboard:shown", sampler="random") as study:
        [process] = study._trackers._all.values()
        kept = os.dup(process.stdin.fileno())
        study.run(objective, trials=3)
    os.close(kept)
    assert sorted(path.name for path in Path("shown/mine").glob("[0-9]*")) == ["0", "1", "2"]


#: program of a tracker's process in which the tracker runs a statement when it is made
MADE = """
import os, sys, time
from shadho_celery.session import tracking

def made(study, key, uri):
    {1}

tracking.named, tracking.WAIT_SECONDS, tracking.END_SECONDS = lambda place: made, {0}, {0}
tracking.main(*sys.argv[1:])
"""
ADDED = "; a run with --resume mine adds them"


@cases(
    "seconds, statement, expected",
    [
        (0.1, "time.sleep(1000)", ["wandb still lacks trials; Ctrl-C ends the wait", f"wandb may lack trials{ADDED}"]),
        (
            100.0,
            "print('//me:pw@host \\33[2J', file=sys.stderr, flush=True); os._exit(3)",
            [f"wandb may lack trials, as its process ended: //***@host \\x1b[2J{ADDED}"],
        ),
        (
            100.0,
            "print('a line' * 10**6); print('a line' * 10**6, file=sys.stderr); raise OSError('full')",
            ["Warning: wandb takes no trials: OSError: full; trying again", f"wandb may lack trials{ADDED}"],
        ),
    ],
)
def test_a_tracker_that_hangs_dies_or_prints_ends_with_the_run(
    seconds: float, statement: str, expected: list[str], tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Its process is a real one."""
    with pytest.MonkeyPatch.context() as monkeypatch:
        folder = tmp_path_factory.mktemp("made")
        monkeypatch.chdir(folder)
        with pytest.MonkeyPatch.context() as of_case:
            url = Case(folder, of_case).url
        monkeypatch.setattr(tracking, "find_spec", lambda name: SimpleNamespace(origin=""))
        monkeypatch.setattr(tracking, "CHILD", MADE.format(seconds, statement))
        told = list[str]()
        Trackers(StudySettings(track="wandb"), "mine", url).close(told.append)
        assert told == expected
