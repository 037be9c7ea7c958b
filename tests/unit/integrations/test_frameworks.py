"""Each callback with its framework, in the objective of the README: trained, continued and pruned; and in ranks."""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from acceptance.documents import blocks
from services.documents import DOCUMENTS
from services.extras import needed
from services.frameworks import SEQUENCES, X, Y, bert, lightning_data, lightning_module, train_in_ranks

from shadho_celery.core.trial import Outcome, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.objective.call import call
from shadho_celery.objective.context import LocalContext, TrialStopped

pytestmark = pytest.mark.timeout(300)


@pytest.fixture(autouse=True)
def _in_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Threads of tiny models take more CPU time than they save, also in ranks. Frameworks are imported by the tests."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def block(framework: str, **names: object) -> Callable[..., Any]:
    """Return the objective of the README for a framework, which uses `names`."""
    texts = blocks(DOCUMENTS["integrations"], "python")
    [text] = [each for each in texts if f"integrations.{framework} import" in each]
    assert len(text.splitlines()) <= 12
    exec(text, names)
    return names["objective"]  # type: ignore[return-value]


def interrupted() -> bool:
    raise TrialStopped("now")


@dataclass
class Ran:
    """A trial that has run: its reports and its outcome."""

    outcome: Outcome
    reports: list[tuple[int, float]]
    files: list[str]

    @property
    def steps(self) -> list[int]:
        return [step for step, _ in self.reports]


@dataclass
class Study:
    """Runs trials of an objective. `steps` is the number of steps in a unit of the budget."""

    objective: Callable[..., Any]
    folder: Path
    params: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1

    def run(self, name: str, budget: int, **facts: Any) -> Ran:
        """Run a trial with the folder `name`. It should stop after `most` reports."""
        reports: list[tuple[int, float]] = []
        most, folder = facts.pop("most", 100), self.folder / name
        facts = {"checkpoints": folder, "budget": budget, "stopped": lambda: len(reports) >= most, **facts}
        context = LocalContext(on_report=lambda step, loss: reports.append((step, loss)), **facts)  # type: ignore[arg-type]
        outcome = call(self.objective, lambda: dict(self.params), context)
        return Ran(outcome, reports, [path.name for path in folder.iterdir()] if folder.exists() else [])

    def reaches(self, *budget: int) -> list[int]:
        return [self.steps * each for each in budget]

    def check(self) -> tuple[Ran, Ran]:
        """Check trials that are continued, pruned, and copied. Return a trial in one piece and one in two."""
        whole = self.run("whole", 4)
        assert whole.steps == self.reaches(1, 2, 3, 4), whole.outcome.error
        # A promoted trial continues from the rung below.
        assert self.run("parts", 2).steps == self.reaches(1, 2)
        parts = self.run("parts", 4)
        assert parts.steps == self.reaches(3, 4)
        assert parts.outcome.state is TrialState.COMPLETE
        # An attempt that was lost after its last checkpoint has nothing left to train.
        again = self.run("parts", 4)
        assert again.outcome.state is TrialState.COMPLETE, again.outcome.error
        pruned = self.run("pruned", 4, most=2)
        assert pruned.steps == self.reaches(1, 2)
        assert pruned.outcome.state is TrialState.CANCELLED
        assert self.run("copy", 1, is_copy=True).files == []
        # The exception that a pruned trial gets between two evaluations passes through the framework.
        assert "TrialStopped: now" in str(self.run("interrupted", 4, stopped=interrupted).outcome.error)
        return whole, parts


def test_xgboost_continues_with_the_trees_of_the_checkpoint(tmp_path: Path) -> None:
    xgboost = needed("xgboost")
    data = xgboost.DMatrix(X, Y)
    study = Study(block("xgboost", TRAIN=data, VALID=data), tmp_path, {"max_depth": 2, "nthread": 1, "verbosity": 0})
    whole, parts = study.check()
    assert parts.reports == whole.reports[2:]
    from shadho_celery.integrations.xgboost import ShadhoCallback

    context = LocalContext(checkpoints=tmp_path / "cv")
    result = xgboost.cv({"nthread": 1}, data, 3, callbacks=[ShadhoCallback("test-rmse", context)])
    assert (len(result), context.reports.made) == (3, 3)


def test_lightgbm_continues_with_the_trees_of_the_checkpoint(tmp_path: Path) -> None:
    lightgbm = needed("lightgbm")
    data = X, Y[:, 0]
    params = {"num_leaves": 4, "num_threads": 1, "verbose": -1, "min_data_in_leaf": 5}
    study = Study(block("lightgbm", TRAIN=data, VALID=data), tmp_path, params)
    whole, parts = study.check()
    assert parts.reports == [(step, pytest.approx(loss)) for step, loss in whole.reports[2:]]
    from shadho_celery.integrations.lightgbm import ShadhoCallback

    context = LocalContext(checkpoints=tmp_path / "cv")
    result = lightgbm.cv(
        params, lightgbm.Dataset(*data), 3, stratified=False, callbacks=[ShadhoCallback("valid-l2", context)]
    )
    assert (len(result["valid l2-mean"]), context.reports.made) == (3, 3)


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::lightning")
def test_lightning_continues_from_the_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    needed("lightning.pytorch")
    monkeypatch.chdir(tmp_path)
    data = lightning_data()
    study = Study(block("lightning", TRAIN=data, VALID=data, make_model=lambda _: lightning_module()), tmp_path)
    whole, parts = study.check()
    assert parts.reports == whole.reports[2:]
    assert whole.files == ["lightning.ckpt"]
    validates_twice(tmp_path / "twice", data)


def validates_twice(folder: Path, data: Any) -> None:
    """With two validations in an epoch there are two reports, and a step is one of the optimiser."""
    from lightning.pytorch import Trainer

    from shadho_celery.integrations.lightning import ShadhoCallback

    steps: list[int] = []
    for epochs in (1, 2):
        context = LocalContext(checkpoints=folder, on_report=lambda step, _: steps.append(step))
        callback = ShadhoCallback("val_loss", context)
        trainer = Trainer(max_epochs=epochs, callbacks=[callback], devices=1, logger=False, val_check_interval=2)
        trainer.fit(lightning_module(), data, data, ckpt_path=callback.checkpoint)
        trainer.validate(trainer.model, data)
    assert steps == [2, 4, 6, 8]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:::transformers", "ignore:::torch")
def test_transformers_continues_from_the_latest_complete_checkpoint(tmp_path: Path) -> None:
    transformers = needed("transformers")

    def make_model(_: object) -> Any:
        # A new model has other weights, and is not trained at a rate of 0: its loss shows whose weights it has.
        transformers.set_seed(random.SystemRandom().randrange(1000))
        return bert()

    objective = block("transformers", TRAIN=SEQUENCES, VALID=SEQUENCES, make_model=make_model)
    study = Study(objective, tmp_path, {"rate": 0.0}, steps=2)
    whole, parts = study.check()
    assert len({loss for _, loss in whole.reports}) == 1
    assert study.run("parts", 5).reports == [(10, parts.reports[0][1])]
    (tmp_path / "parts" / "checkpoint-99").mkdir()
    assert study.run("parts", 6).steps == [12]
    several_data_sets(tmp_path / "several")


def several_data_sets(folder: Path) -> None:
    """Of several data sets that are evaluated one after another, one has the metric; if none has, it is an error."""
    from transformers import Trainer, TrainingArguments

    from shadho_celery.integrations.transformers import ShadhoCallback

    how = {"eval_strategy": "steps", "eval_steps": 1, "save_strategy": "no", "report_to": "none", "disable_tqdm": True}
    arguments = TrainingArguments(output_dir=folder, max_steps=3, **how)
    data, steps = {"a": SEQUENCES, "b": SEQUENCES}, list[int]()
    context = LocalContext(checkpoints=folder, on_report=lambda step, _: steps.append(step))

    def train(metric: str) -> None:
        callbacks = [ShadhoCallback(metric, context)]
        trainer = Trainer(bert(), arguments, train_dataset=SEQUENCES, eval_dataset=data, callbacks=callbacks)
        trainer.train()
        trainer.evaluate()

    train("eval_b_loss")
    assert steps == [1, 2, 3]
    with pytest.raises(UsageError, match="no metric 'eval_loss' was evaluated; there are: eval_a_loss, "):
        train("eval_loss")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning:keras")
def test_keras_continues_by_itself(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KERAS_BACKEND", os.environ.get("KERAS_BACKEND", "torch"))
    keras = needed("keras")

    def make_model(_: object) -> Any:
        keras.utils.set_random_seed(0)
        model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
        model.compile("adam", "mse")
        return model

    study = Study(block("keras", TRAIN=(X, Y, 64), VALID=(X, Y), make_model=make_model), tmp_path)
    whole, parts = study.check()
    assert parts.reports == [(step, pytest.approx(loss)) for step, loss in whole.reports[2:]]
    # A process that was killed while it wrote a checkpoint leaves the one before.
    torn = tmp_path / "parts" / "keras" / "latest.weights.h5"
    torn.write_bytes(torn.read_bytes()[:1000])
    assert study.run("parts", 4).steps == [4]


@pytest.mark.slow
def test_ranks_stop_at_the_same_step_and_continue_from_one_checkpoint(tmp_path: Path) -> None:
    """Under DistributedDataParallel, rank 0 reports and saves, for Lightning and Transformers."""
    needed("lightning.pytorch")
    needed("transformers")
    steps: list[int] = []
    # It is to stop at each second report.
    context = LocalContext(
        checkpoints=tmp_path / "unused",
        slots=2,
        gpus=2,
        on_report=lambda step, _: steps.append(step),
        preempted=lambda: bool(steps) and len(steps) % 2 == 0,
    )
    context.launch(train_in_ranks, tmp_path)
    assert steps == [1, 2, 3, 4] * 2
    expected = [(2, False), (4, True), (1, False)] * 2
    assert [(tmp_path / f"rank-{rank}").read_text() for rank in range(2)] == [repr(expected)] * 2
