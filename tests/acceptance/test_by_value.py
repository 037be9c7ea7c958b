"""Functions by value: lambdas of scripts and cells of notebooks run on workers."""

from __future__ import annotations

import json
import os
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from acceptance.commands import ROOT, Desk, signed_fleet, until
from acceptance.commands import desk as make_desk

pytestmark = pytest.mark.timeout(180)

BEGIN = """
import json
import time
import numpy as np
import shadho_celery
from shadho_celery import hp
from own_helper import scale

DATA = np.arange(1_000_000.0)
SPACE = {"x": hp.uniform("x", 0, 1), "scale": hp.choice("scale", [scale, abs])}

def change(p):
    assert DATA[0] == 0
    DATA[0] = 1
    return p["scale"](p["x"]) + DATA[1]
"""

SCRIPT = (
    BEGIN
    + """
study = shadho_celery.minimize(
    lambda p: {"loss": change(p), "got": float(p["x"])}, SPACE, trials=8, seed=0, workers=2, progress=False,
    fidelity={"least": 1, "most": 3}, pruner="median", at_once=1, keep={"best": 1},
)
print(json.dumps({
    "states": [str(each) for each in study.counts],
    "module": study.module,
    "classes": sorted({trial.compute_class for trial in study.trials}),
    "keep": study.record.in_force["keep"],
    "is_right": all(trial.loss == 1 + trial.metrics["got"] for trial in study.trials),
}))
"""
)

AGAIN = """
import json, sys
import shadho_celery
from shadho_celery import hp

N = int(sys.argv[1])
more = {} if sys.argv[2] == "0" else {"n_jobs": int(sys.argv[2])}
study = shadho_celery.minimize(
    lambda p: p["x"] + N, hp.choice("x", [{"x": hp.uniform("x1", 0, 1)}, {"x": 2}]), trials=int(sys.argv[3]), seed=1,
    store="sqlite:///shadho.db", study="mine", resume="if-exists", progress=False, **more
)
print(len({trial.code for trial in study.trials}))
"""


def helper(desk: Desk) -> None:
    desk.write("own_helper.py", "def scale(x): return x\n")


def test_a_lambda_of_a_script_runs_on_two_workers_with_its_data_and_settings(desk: Desk) -> None:
    """The script needs no main guard, because no worker imports it. Its files are removed at the end."""
    helper(desk)
    desk.write("own.py", SCRIPT)
    run = desk.start(sys.executable, "own.py").wait(90)
    assert run.code == 0, desk.said()
    expected = {"states": ["COMPLETE"], "module": "", "classes": ["cpu"], "is_right": True}
    assert json.loads(run.out.splitlines()[-1]) == {**expected, "keep": {"best": 1}}
    assert not (desk.folder / ".shadho/functions").exists()
    until(lambda: not (desk.folder / ".shadho/embedded").exists(), 20, desk.said)


def test_a_search_on_workers_says_that_its_first_trials_have_all_failed_and_where(desk: Desk) -> None:
    desk.write(
        "own.py",
        "from shadho_celery import hp, minimize\n\n\ndef bad(p):\n    raise ValueError('on purpose')\n\n\n"
        "study = minimize(bad, hp.uniform('x', 0, 1), trials=50, workers=1, max_failures=3, progress=False)\n"
        "print(study.trials[0].error)\n",
    )
    run = desk.start(sys.executable, "own.py").wait(90)
    assert run.code == 0, desk.said()
    assert "stopped: the first 3 trials have all failed with ValueError: on purpose" in run.err
    assert "(max_failures)" in run.err
    assert 'own.py", line 5, in bad\n    raise ValueError(' in run.out


def test_a_study_goes_on_on_workers_and_an_edit_is_another_version(desk: Desk) -> None:
    """An unchanged function is the same version in another process, and on workers."""
    desk.write("own.py", AGAIN)
    runs = [desk.ran("own.py", "1", "0", "3")]
    runs += [desk.start(sys.executable, "own.py", *words).wait(90) for words in (("1", "2", "6"), ("2", "1", "8"))]
    assert [(run.code, run.out) for run in runs] == [(0, "1\n"), (0, "1\n"), (0, "2\n")], desk.said()
    assert ["is now version" in run.err for run in runs] == [False, False, True]


def test_a_function_that_cannot_be_sent_ends_a_script_in_one_line(desk: Desk) -> None:
    desk.write(
        "own.py",
        "import threading, shadho_celery\nfrom shadho_celery.errors import UsageError\nLOCK = threading.Lock()\n"
        "try:\n    shadho_celery.minimize(lambda p: LOCK, shadho_celery.hp.uniform('x', 0, 1), workers=2)\n"
        "except UsageError as error:\n    print(error)\n    raise SystemExit(error.exit_code)\n",
    )
    run = desk.ran("own.py")
    assert (run.code, run.out.count("\n")) == (2, 1)
    assert "its global LOCK is a _thread.lock" in run.out
    assert not (desk.folder / ".shadho").exists()


def test_a_function_is_sent_signed_to_the_workers_of_a_fleet_that_accept_code(
    desk: Desk, redis_url: str, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """They get the modules of its folder too. A second run with other data sends them as well."""
    helper(desk)
    urls = signed_fleet(desk, redis_url)
    text = BEGIN.replace("1_000_000", "1_000")
    where = f"broker={redis_url!r}, redis={redis_url!r}, store='sqlite:///s.db', study='one', resume='if-exists'"
    desk.write(
        "own.py",
        f"import sys\n{text}DATA[1] = float(sys.argv[1])\n"
        f"study = shadho_celery.minimize(lambda p: change(p), SPACE, trials=int(sys.argv[2]), seed=0, {where})\n"
        "print([int(trial.loss) for trial in study.trials])\n",
    )
    with make_desk(tmp_path_factory.mktemp("worker")) as node:
        words = ("-m", "shadho_celery.worker", "--class", "solo", "--slots", "1", "--accept-code")
        worker = node.start(sys.executable, *words, **urls)
        worker.says("ready")
        runs = [desk.start(sys.executable, "own.py", *words, **urls).wait(90) for words in (("2", "3"), ("4", "6"))]
        assert [run.out for run in runs] == ["[2, 2, 2]\n", "[2, 2, 2, 4, 4, 4]\n"], desk.said() + node.said()


def notebook(folder: Path, *cells: str) -> Iterator[list[Any]]:
    """Yield the outputs of each cell of a notebook that runs in a folder."""
    nbclient, nbformat = pytest.importorskip("nbclient"), pytest.importorskip("nbformat")
    pytest.importorskip("ipykernel")
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    client = nbclient.NotebookClient(book, kernel_name="python3", allow_errors=True, timeout=120)
    client.resources = {"metadata": {"path": str(folder)}}
    client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    yield from (cell.outputs for cell in book.cells)


CELLS = (
    f"{BEGIN}\nimport os\nfrom pathlib import Path\nPath('pid').write_text(str(os.getpid()))\nN = 1",
    "study = shadho_celery.minimize(lambda p: change(p) + N, SPACE, trials=6, seed=0, workers=2)\nstudy",
    "N = 2\nstudy = shadho_celery.minimize(lambda p: change(p) + N, SPACE, trials=6, seed=0, n_jobs=2)\n"
    "print(int(study.best_loss))",
    "def slow(p):\n    Path('began').touch()\n    time.sleep(.5)\n    return p['x']\n"
    "study = shadho_celery.minimize(slow, SPACE, trials=200, workers=2)\n"
    "print(0 < study.count('COMPLETE') < 200)",
    "shadho_celery.minimize(lambda p: get_ipython(), SPACE, trials=2, workers=2)",
)


def test_a_notebook_shows_the_last_state_obeys_ctrl_c_and_an_edited_cell(desk: Desk) -> None:
    helper(desk)

    def interrupt() -> None:
        until((desk.folder / "began").exists, 120)
        os.kill(int((desk.folder / "pid").read_text()), signal.SIGINT)

    thread = threading.Thread(target=interrupt)
    thread.start()
    _, first, edited, interrupted, refused = notebook(desk.folder, *CELLS)
    thread.join()
    lines = "".join(each.text for each in first if each.output_type == "stream").splitlines()
    assert [line.partition(" ")[0] for line in lines] == ["study", "study"]
    assert "6 complete, 0 failed of 6 trials; best loss" in lines[1]
    assert "best loss" in first[-1].data["text/html"]
    assert edited[-1].text == "3\n"
    assert interrupted[-1].text == "True\n"
    assert "stopping: running trials finish first" in "".join(each.text for each in interrupted)
    assert (refused[-1].output_type, refused[-1].ename) == ("error", "UsageError")
