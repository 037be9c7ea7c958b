"""Makes the README's picture from a real run: ``python tests/benchmarks/picture.py .readme/live.svg``."""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from io import StringIO
from pathlib import Path

from rich.console import Console

from shadho_celery.cli import live, tables
from shadho_celery.embedded.embedded import Embedded
from shadho_celery.fleet.executor import QueueExecutor
from shadho_celery.objective import study_file
from shadho_celery.results.report import report_of, run_of
from shadho_celery.results.trial import Values
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.space.compile import compile_space
from shadho_celery.store.sql import SqlStore
from shadho_celery.study.limits import Limits
from shadho_celery.study.open import open_study
from shadho_celery.transport import urls
from shadho_celery.transport.broker import Publisher
from shadho_celery.transport.redis import connect


def main() -> None:
    """Draw what the command line asks for."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("target", type=Path, help="the picture, an SVG file")
    parser.add_argument("--trials", type=int, default=60)
    given = parser.parse_args()
    draw(given.target, given.trials)


def draw(target: Path, trials: int) -> None:
    """Run tasks.svm embedded, and draw the view two thirds of the way and the table at the end."""
    file = study_file.load("tasks.svm")
    space = compile_space(file.space)
    console = Console(record=True, width=108, file=StringIO(), force_terminal=True, highlight=False)
    target = target.absolute()
    # Workers import tasks/ from the checkout; what the run leaves behind stays out of it.
    os.environ["PYTHONPATH"] = str(Path.cwd())
    with tempfile.TemporaryDirectory() as folder:
        os.chdir(folder)
        store = SqlStore()
        study = open_study(store, space.describe(), module=file.module, name="digits", seed=0)
        fleet = Embedded(Path(folder), {"gpu_large": 1, "gpu_small": 1, "cpu": 1}, [file.module], os.cpu_count() or 1)
        try:
            fleet.await_redis()
            os.environ.update(fleet.urls)
            client, publisher = connect(fleet.urls[urls.REDIS]), Publisher.configured()
            executor = QueueExecutor(client, publisher, study.record.key, file.module, study.live)
            scheduler = make_scheduler(Plan.of(space, limits=Limits(trials=trials)), study, executor)
            view = live.LiveView(
                scheduler, space, console, live.Fleet(workers=lambda: executor.workers.announced, module=file.module)
            )
            began = time.monotonic()
            drawn: list[bool] = []

            def look() -> None:
                if not drawn and study.counted >= 2 * trials // 3:
                    console.print(f"[bold]$ shadho-celery run tasks.svm --trials {trials} --seed 0[/bold]\n")
                    console.print(view.picture())
                    drawn.append(True)

            scheduler.run(look)
            console.print("\n... and at the end:\n")
            again = f"shadho-celery run tasks.svm --resume digits --trials {2 * trials}"
            report = report_of(study, store, Values(study.record, space.evaluate))
            tables.summary(report, console, again, run_of(study, time.monotonic() - began, study.counted, {}))
        finally:
            fleet.close()
    target.parent.mkdir(exist_ok=True)
    console.save_svg(str(target), title="shadho_celery")


if __name__ == "__main__":
    main()
