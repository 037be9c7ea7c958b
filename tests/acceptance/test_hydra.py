"""Sweeps of Hydra, each in processes of its own: one that is interrupted and continued, and jobs that fail."""

from __future__ import annotations

import importlib.util
import os
import shlex
import shutil
from pathlib import Path

import pytest
from acceptance.commands import ROOT, Desk, until
from acceptance.documents import blocks, commands
from services.documents import DOCUMENTS
from services.extras import needed

ROOM = ROOT / "shadho_celery" / "integrations"

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]


@pytest.fixture(name="desk")
def _with_plugin(desk: Desk) -> Desk:
    """A folder in which Hydra finds the sweeper: the installed one, else a copy at the place of the installed one."""
    needed("hydra")
    try:
        is_installed = importlib.util.find_spec("hydra_plugins.shadho_sweeper") is not None
    except ModuleNotFoundError:
        is_installed = False
    if not is_installed:
        assert os.environ.get("CI") != "true", "an installation has the sweeper"
        (plugins := desk.temporary / "hydra_plugins").mkdir()
        shutil.copy(ROOM / "hydra_plugin.py", plugins / "shadho_sweeper.py")
        desk.environment["PYTHONPATH"] += f"{os.pathsep}{desk.temporary}"
    return desk


def test_a_sweep_that_is_interrupted_continues(desk: Desk) -> None:
    """The document's command ends at Ctrl-C with its running jobs, and continues with resume=true and another limit."""
    yaml = needed("yaml")
    [app] = [text for text in blocks(DOCUMENTS["integrations"], "python") if "hydra.main" in text]
    [command] = [line for line in commands(DOCUMENTS["integrations"]) if "hydra/sweeper" in line]
    held = "    import pathlib, time\n    while not pathlib.Path('go').exists():\n        time.sleep(0.05)\n"
    desk.write("app.py", app.replace("    return", f"{held}    return"))
    (desk.folder / "conf").mkdir()
    desk.write("conf/config.yaml", "lr: 0.01\nopt: adam\n")
    words = [*shlex.split(command), "hydra.sweeper.workers=2"]

    first = desk.start(*words)
    until(lambda: len(list(desk.folder.glob(".shadho/checkpoints/*/[01]/.hydra"))) == 2, 90, desk.said)
    first.interrupt()
    first.says("running trials finish first")
    desk.write("go", "")
    assert first.wait().code == 0, desk.said()
    assert desk.states() == {"COMPLETE": 2}
    assert "the same command with hydra.sweeper.resume=true continues it" in first.out

    second = desk.start(*words, "hydra.sweeper.resume=true", "hydra.sweeper.trials=3").wait()
    assert second.code == 0, desk.said()
    assert [(trial["number"], trial["state"]) for trial in desk.trials()] == [(n, "COMPLETE") for n in range(3)]
    before, after = [yaml.safe_load(path.read_text()) for path in sorted(results(desk), key=os.path.getmtime)]
    assert before["study"] == after["study"]
    assert after["best_value"] == min(trial["loss"] for trial in desk.trials()) <= before["best_value"]
    best = after["best_params"]
    assert abs(best["lr"] - 0.01) + (best["opt"] == "sgd") == pytest.approx(after["best_value"])


def results(desk: Desk) -> list[Path]:
    return [*desk.folder.glob("multirun/*/*/optimization_results.yaml")]


#: an app without a config file, whose jobs end in the way that they are given
APP = """
import json
import hydra
from omegaconf import OmegaConf

@hydra.main(version_base=None, config_path=None)
def main(config):
    assert OmegaConf.is_config(config)
    if config.how == "raises":
        raise ValueError("boom")
    if config.how == "prints":
        print(json.dumps({"loss": 0.25}))

main()
"""


def test_a_job_that_raises_or_prints_no_loss_fails_and_the_others_count(desk: Desk) -> None:
    desk.write("app.py", APP)
    keys = ("hydra.sweeper.sampler=grid", "hydra.sweeper.trials=3", "hydra.sweeper.workers=2")
    sweep = desk.start("python", "app.py", "-m", "hydra/sweeper=shadho", "+how=raises,is_silent,prints", *keys).wait()
    assert sweep.code == 0, desk.said()
    found = {trial["params"]["+how"]: trial for trial in desk.trials()}
    assert [found[place]["state"] for place in range(3)] == ["FAILED", "FAILED", "COMPLETE"]
    shown = desk.told("trials", "app", "--failed").out
    assert "ValueError: boom" in found[0]["error"].splitlines()[-1], shown
    assert "has not printed a loss; print a JSON line" in found[1]["error"]
    assert "a job of Hydra may return it" in found[1]["error"]
    assert "best_params': {'+how': 'prints'}, 'best_value': 0.25" in sweep.out
