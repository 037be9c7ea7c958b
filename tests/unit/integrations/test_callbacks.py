"""What all callbacks share: the trial that they find, when they save, and what they say."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from threading import Thread

import pytest

from shadho_celery.errors import UsageError
from shadho_celery.integrations.callbacks import TrialCallback
from shadho_celery.objective import script
from shadho_celery.objective.call import call
from shadho_celery.objective.context import CURRENT, LocalContext


class Callback(TrialCallback):
    file = "model.txt"


def test_a_callback_finds_the_trial_whose_objective_creates_it(tmp_path: Path) -> None:
    reports: list[tuple[int, object]] = []
    context = LocalContext(checkpoints=tmp_path, on_report=lambda step, loss: reports.append((step, loss)))

    def objective(_: object) -> float:
        callback = Callback("loss")
        assert callback.context is CURRENT.get() is context
        assert not callback.stops(3, {"loss": 0.5, "accuracy": 0.1})
        return 0.5

    assert call(objective, dict, context).loss == 0.5
    assert reports == [(3, 0.5)]
    assert CURRENT.get() is None


def test_a_metric_to_maximise_is_reported_as_it_is(tmp_path: Path) -> None:
    reports: list[object] = []
    objectives = {"accuracy": "maximize"}
    context = LocalContext(checkpoints=tmp_path, objectives=objectives, on_report=lambda _, loss: reports.append(loss))
    Callback("val_acc", context).stops(1, {"val_acc": 0.75})
    assert reports == [-0.75]


def test_a_metric_that_is_missing_is_an_error_with_those_that_there_are(tmp_path: Path) -> None:
    callback = Callback("acc", LocalContext(checkpoints=tmp_path))
    with pytest.raises(UsageError, match=r"^no metric 'acc' was evaluated; there are: accuracy, loss$"):
        callback.stops(1, {"accuracy": 0.5, "loss": 1.0})
    with pytest.raises(UsageError, match="there are: none"):
        callback.stops(1, {})


def test_outside_of_a_trial_a_callback_does_nothing_and_says_so_once() -> None:
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("default")
        for _ in range(2):
            callback = Callback("loss")
            assert not callback.stops(1, {})
            callback.save(b"model")
    assert ["no trial runs here, so this callback does nothing" in str(each.message) for each in said] == [True]
    assert callback.path is callback.checkpoint is None


def test_a_script_that_runs_as_a_command_reports_to_its_trial(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the ranks that its framework starts, the first one reports, and all stop and have the same checkpoint."""
    (reports := tmp_path / "reports").touch()
    files = {script.REPORTS: reports, script.STOP: tmp_path / "STOP", script.CHECKPOINT_DIR: tmp_path / "kept"}
    for name, path in files.items():
        monkeypatch.setenv(name, str(path))
    for rank in (None, "1"):
        if rank:
            monkeypatch.setenv("LOCAL_RANK", rank)
        callback = Callback("loss")
        (tmp_path / "STOP").unlink(missing_ok=True)
        assert not callback.stops(1, {"loss": 0.5})
        (tmp_path / "STOP").touch()
        assert callback.stops(2, {"loss": float("nan")})
        assert callback.saves(every_rank=True)
        callback.save(b"model")
        assert callback.checkpoint == tmp_path / "kept" / "model.txt"
    first, second = map(json.loads, reports.read_text().splitlines())
    assert first == {"step": 1, "loss": 0.5}
    assert second["step"] == 2


def test_a_thread_of_the_objective_gives_the_context_itself(tmp_path: Path) -> None:
    found: list[object] = []

    def objective(_: object, context: LocalContext) -> float:
        thread = Thread(target=lambda: found.extend([CURRENT.get(), Callback("loss", context).context]))
        thread.start()
        thread.join()
        return 0.0

    call(objective, dict, context := LocalContext(checkpoints=tmp_path))
    assert found[-1] is context


def test_one_process_of_a_trial_saves_unless_it_is_pruned_or_a_copy(tmp_path: Path) -> None:
    def kept(**facts: object) -> bool:
        callback = Callback("loss", LocalContext(checkpoints=tmp_path, **facts))  # type: ignore[arg-type]
        callback.save(b"model")
        is_kept = callback.checkpoint is not None
        (tmp_path / "model.txt").unlink(missing_ok=True)
        return is_kept

    assert kept()
    assert kept(timed_out=lambda: True)
    assert kept(preempted=lambda: True)
    assert not kept(stopped=lambda: True)
    assert not kept(is_copy=True)
    assert [*tmp_path.iterdir()] == []


def test_every_rank_has_the_same_answer_though_only_the_first_slot_knows_that_the_trial_is_pruned() -> None:
    first, second = (LocalContext(slots=2, stopped=lambda knows=knows: knows) for knows in (True, False))
    assert [Callback("loss", each).saves(every_rank=True) for each in (first, second)] == [True, True]
