"""Studies that a program runs on workers, and the programs in the document beside the code."""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

import pytest
from acceptance.commands import Desk
from services.documents import text_of

pytestmark = pytest.mark.timeout(120)

PROGRAMS = re.findall(r"^```python\n(.*?)^```", text_of("program"), re.MULTILINE | re.DOTALL)

#: environment variables that a study on workers sets while it runs
OURS = ["CELERY_BROKER_URL", "SHADHO_REDIS_URL", "SHADHO_IGNORE_CELERYCONFIG"]

ON_WORKERS = """
import json, os
import shadho_celery

study = shadho_celery.minimize("my_study", trials=6, seed=0, {where}, enqueue=[{{"x2": 0.25}}])
best = study.best
print(json.dumps({{
    "states": sorted(map(str, study.counts)),
    "classes": sorted({{trial.compute_class for trial in study.trials}}),
    "first": study.trials[0].values["x"],
    "is_best": best.loss == min(trial.loss for trial in study.trials),
    "name": study.name,
    "left": [name for name in {ours} if name in os.environ],
}}))
"""


@pytest.mark.parametrize("program", PROGRAMS, ids=range(len(PROGRAMS)))
def test_a_program_of_the_document_runs(desk: Desk, program: str) -> None:
    desk.write("own.py", program)
    run = desk.ran("own.py")
    assert (run.code, run.out != "") == (0, True), run.err


def checked(out: str, compute_class: str) -> None:
    found = json.loads(out.splitlines()[-1])
    assert re.fullmatch(r"my_study-[0-9a-f]{4}", found.pop("name"))
    assert found == {"states": ["COMPLETE"], "classes": [compute_class], "first": 0.25, "is_best": True, "left": []}


def test_a_study_file_runs_on_embedded_workers(desk: Desk) -> None:
    desk.study()
    desk.write("own.py", ON_WORKERS.format(where="workers={'cpu': 1}, progress=False", ours=OURS))
    run = desk.start(sys.executable, "own.py").wait(60)
    assert run.code == 0, desk.said()
    checked(run.out, "cpu")


def test_a_module_with_objective_and_space_may_have_workers(desk: Desk) -> None:
    """So may several studies of one program, one after the other."""
    desk.study()
    desk.write(
        "own.py",
        "import my_study, shadho_celery\n"
        "study = shadho_celery.minimize(my_study.objective, my_study.SPACE, trials=2, workers={'cpu': 1})\n"
        "again = shadho_celery.minimize('my_study', trials=1, workers={'cpu': 1})\n"
        "print(study.count('COMPLETE'), again.count('COMPLETE'), study.module)\n",
    )
    run = desk.start(sys.executable, "own.py").wait(60)
    assert run.code == 0, desk.said()
    assert run.out.splitlines()[-1] == "2 1 my_study"


def test_a_script_without_a_guard_ends_in_one_line_and_starts_nothing(desk: Desk) -> None:
    """Each worker would import it, and start servers and workers of its own, without end."""
    desk.write(
        "script.py",
        "from hyperopt import hp\nimport shadho_celery\nSPACE = {'x': hp.uniform('x', 0, 1)}\n"
        "def objective(params): return params['x']\n"
        "shadho_celery.minimize('script', workers={'cpu': 1}, trials=2)\n",
    )
    run = desk.start(sys.executable, "script.py").wait(60)
    assert (run.code, run.out, run.err.count("\n")) == (2, "", 1), desk.said()
    assert 'if __name__ == "__main__":' in run.err
    assert not desk.processes()
    assert not desk.folder.joinpath(".shadho").exists()


@pytest.fixture
def small_fleet(desk: Desk, redis_url: str) -> str:
    """URL of the Redis of a worker that serves the study."""
    desk.study()
    desk.start(
        *(sys.executable, "-m", "shadho_celery.worker", "--import", "my_study", "--class", "solo", "--slots", "1"),
        CELERY_BROKER_URL=redis_url,
        SHADHO_REDIS_URL=redis_url,
    )
    return redis_url


def test_a_study_file_runs_on_a_fleet(desk: Desk, small_fleet: str) -> None:
    desk.write("own.py", ON_WORKERS.format(where=f"broker={small_fleet!r}, redis={small_fleet!r}", ours=OURS))
    run = desk.start(sys.executable, "own.py", SHADHO_BROKER_URL="amqp://127.0.0.1:1").wait(90)
    assert run.code == 0, desk.said()
    checked(run.out, "solo")


def test_known_points_come_from_a_file(desk: Desk) -> None:
    desk.study()
    Path(desk.folder / "points.jsonl").write_text('{"x": 0.5}\n\n{"side": "right", "n": 3}\n')
    run = desk.told("run", "my_study", "--trials", "3", "--workers", "cpu=1", "--enqueue", "points.jsonl", "--json")
    assert run.code == 0, run.err
    trials = [trial["params"] for trial in sorted(desk.trials(), key=lambda trial: trial["number"])]
    assert trials[0] == {"side": 0, "x": 0.5}
    assert (trials[1]["side"], trials[1]["n"]) == (1, 3.0)
    assert len(trials) == 3
