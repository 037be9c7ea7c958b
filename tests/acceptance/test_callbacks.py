"""A study of XGBoost on workers, with the objective of the README: its callback reports, is pruned, and continues."""

from __future__ import annotations

import pytest
from acceptance.commands import Desk
from acceptance.documents import blocks
from services.documents import DOCUMENTS
from services.extras import needed

pytestmark = pytest.mark.timeout(180)

STUDY_FILE = """
import time

import numpy
from hyperopt import hp

SPACE = {{"max_depth": 2, "nthread": 1, "eta": hp.loguniform("eta", -6, 0)}}
STUDY = {{
    "trials": 20,
    "sampler": "random",
    "fidelity": {{"least": 4, "most": 12, "eta": 3, "how": "asha"}},
    "pruner": "threshold:2",
}}

{block}

class Waiting(ShadhoCallback):
    def after_iteration(self, model, epoch, evals_log):
        stop, waits = super().after_iteration(model, epoch, evals_log), 1000
        while evals_log["valid"]["rmse"][-1] > 2 and not stop and waits:  # a round may be faster than the pruner
            time.sleep(0.02)
            stop, waits = self.context.should_stop(), waits - 1
        return stop


ShadhoCallback = Waiting

X = numpy.random.default_rng(0).normal(size=(64, 4))
TRAIN = VALID = xgboost.DMatrix(X, X.sum(axis=1))
"""


def test_trials_of_xgboost_are_pruned_and_promoted_trials_continue_from_checkpoints(desk: Desk) -> None:
    needed("xgboost")
    [block] = [text for text in blocks(DOCUMENTS["integrations"], "python") if "import xgboost" in text]
    desk.write("my_study.py", STUDY_FILE.format(block=block))
    command = desk.launch("my_study", "--study", "s", "--workers", "cpu=2", "--seed", "0", "--json").wait(120)
    assert command.code == 0, desk.said()
    trials = desk.told("trials", "s", "--json").json()["trials"]
    promoted = [trial for trial in trials if trial["origin"] is not None]
    pruned = {trial["number"] for trial in trials if trial["state"] == "PRUNED"}
    assert {trial["continued"] for trial in promoted} == {True}
    assert pruned
    # Only pruned trials have written no checkpoint.
    kept = {int(path.parent.name) for path in desk.folder.glob(".shadho/checkpoints/*/*/xgboost.ubj")}
    assert kept == {trial["number"] for trial in trials if trial["origin"] is None} - pruned
    told = desk.told("trial", "s", str(promoted[0]["number"]), "--json").json()
    assert [report["step"] for report in told["reports"]] == [*range(5, 13)]
