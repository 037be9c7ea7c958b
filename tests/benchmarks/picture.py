"""Makes the README's picture of the dashboard: ``python tests/benchmarks/picture.py .readme/study.png``.

The study is simulated: its scheduler, sampler and cost model are the real ones, but its trials only let time pass on a
simulated clock, which has come to the present when the picture is taken.
"""

from __future__ import annotations

import argparse
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
from hyperopt import hp
from PIL import Image

from shadho_celery.core.clock import ManualClock
from shadho_celery.core.settings import StudySettings
from shadho_celery.core.trial import Attempt, Outcome, TrialState
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.simulation.executor import Change, Fleet, SimulatedClass, SimulatedExecutor
from shadho_celery.space.compile import compile_space
from shadho_celery.space.stored import to_json
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study
from shadho_celery.study.state import StudyState

# The folder of the tests has the browser that they use.
sys.path.append(str(Path(__file__).parents[1]))

SPACE = hp.choice(
    "model",
    [
        {
            "name": "net",
            "rate": hp.loguniform("rate", -9, 0),
            "width": hp.quniform("width", 16, 512, 16),
            "dropout": hp.uniform("dropout", 0, 0.5),
        },
        {"name": "forest", "trees": hp.quniform("trees", 10, 500, 10)},
        {"name": "svm", "C": hp.loguniform("C", -5, 10), "gamma": hp.loguniform("gamma", -10, 3)},
    ],
)
#: slots by class, the strongest first, and how many times as fast as a cpu a class runs a net, and anything else
SLOTS = {"gpu_large": 2, "gpu_small": 3, "cpu": 4}
SPEED = {"gpu_large": (16.0, 1.5), "gpu_small": (6.0, 1.2), "cpu": (1.0, 1.0)}
#: one in so many trials fails, and one in so many nets is pruned
FAILED, PRUNED = 29, 5
#: pixels of the picture; a point of its page has 1.5 pixels
WIDTH, HEIGHT, SCALE = 1240, 1000, 1.5
#: number of colours, with which the file is a third as large
COLOURS = 128


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the picture, a PNG file")
    parser.add_argument("--trials", type=int, default=300)
    given = parser.parse_args()
    draw(given.target, given.trials)


def draw(target: Path, trials: int) -> None:
    """Play a study until three quarters of its trials have ended, and take a picture of its page."""
    with tempfile.TemporaryDirectory() as folder:
        with played(f"sqlite:///{folder}/first.db", trials, 0.0) as (_, seconds):
            pass
        url = f"sqlite:///{folder}/study.db"
        with played(url, trials, time.time() - seconds) as (study, _), dashboard(url) as address:
            photograph(address, study.record.name, target)


@contextmanager
def played(url: str, trials: int, start: float) -> Iterator[tuple[StudyState, float]]:
    """Yield a study that still runs, and the simulated seconds since its start."""
    space, clock = compile_space(SPACE), ManualClock(start)
    settings = StudySettings(sampler="tpe", classes=tuple(SLOTS))
    plan = Plan.of(space, settings, Limits(trials=trials))
    given = {**settings.in_force(), "trials": trials}
    store = SqlStore(url)
    study = open_study(
        store, space.describe(), name="digits", seed=1, tree=to_json(space), clock=clock, settle=lambda *_: given
    )
    # A worker comes later than the others, and another one dies and comes back.
    given_changes = ((150, "cpu", 1), (300, "gpu_small", -1), (390, "gpu_small", 1))
    changes = [Change(at=start + at, compute_class=name, workers=workers) for at, name, workers in given_changes]
    fleet = Fleet(classes={name: SimulatedClass(workers=number) for name, number in SLOTS.items()}, changes=changes)
    executor = SimulatedExecutor(fleet, play, clock, recorder=study.recorder)
    scheduler = make_scheduler(plan, study, executor)
    # All events come from the executor.
    scheduler.turn_seconds = math.inf
    scheduler.assign()
    scheduler.fill()
    while study.counted < 3 * trials // 4:
        scheduler.turn()
    try:
        yield study, clock.now() - start
    finally:
        study.close()
        store.close()


def play(attempt: Attempt, compute_class: str) -> Outcome:
    """Return what a trial comes to: wide nets are what GPUs are for."""
    params, rng = attempt.params, np.random.default_rng(attempt.number)
    net, other = SPEED[compute_class]
    seconds = float(rng.lognormal(0, 0.2))
    loss = 0.05 + 0.02 * float(rng.random())
    if "width" in params:
        seconds *= (20 + params["width"]) / net
        loss += 0.04 * abs(math.log(params["rate"]) + 4) ** 1.2 + 1.6 / params["width"] + 0.1 * params["dropout"] ** 2
    elif "trees" in params:
        seconds *= (10 + params["trees"] / 8) / other
        loss += 0.12 + 2 / params["trees"]
    else:
        seconds *= 25 / other
        loss += 0.03 + 0.02 * abs(math.log(params["C"]) - 4) + 0.03 * abs(math.log(params["gamma"]) + 3)
    if attempt.number % FAILED == FAILED - 1:
        return Outcome(state=TrialState.FAILED, error="ValueError: singular matrix", seconds=0.3 * seconds)
    if "width" in params and loss > 0.2 and attempt.number % PRUNED:
        return Outcome(state=TrialState.PRUNED, loss=loss, seconds=0.3 * seconds)
    return Outcome(state=TrialState.COMPLETE, loss=loss, seconds=seconds)


@contextmanager
def dashboard(url: str) -> Iterator[str]:
    """Run a dashboard of a store, and yield the address that logs in."""
    command = [sys.executable, "-m", "shadho_celery", "dashboard", "--port", "0", "--store", url]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = next(line for line in process.stdout if "http://" in line)
            yield line[line.index("http://") :].strip()
        finally:
            process.terminate()


def photograph(address: str, name: str, target: Path) -> None:
    """Write the top of a study's page to a file."""
    from services.browser import chromium

    with chromium() as browser:
        context = browser.new_context(viewport={"width": WIDTH, "height": HEIGHT}, device_scale_factor=SCALE)
        page = context.new_page()
        page.goto(address)
        page.get_by_role("link", name=name).click()
        # The last one of the charts.
        page.get_by_role("heading", name="The reports of trials").wait_for()
        page.mouse.move(0, 0)
        page.screenshot(path=target)
        context.close()
    with Image.open(target) as picture:
        picture.convert("RGB").quantize(COLOURS).save(target, optimize=True)


if __name__ == "__main__":
    main()
