"""Seconds of 100 trials of a lambda in a notebook: one after another, and on two workers with their start included.

python tests/benchmarks/notebook.py

It needs nbclient and ipykernel. The trials sleep, so other work on the machine shows only in the start of the workers.
"""

from __future__ import annotations

import os
import tempfile
from typing import Any

import nbclient
import nbformat
from figures import ROOT, count, finish, goal, make_parser

CELLS = (
    "import time\nfrom shadho_celery import hp, minimize\nspace = {'x': hp.uniform('x', -5, 5)}",
    "began = time.monotonic()\n"
    "minimize(lambda p: time.sleep({seconds}) or p['x'] ** 2, space, trials={trials}, seed=0, workers={workers})\n"
    "print(time.monotonic() - began)",
)


def seconds_of(workers: int | None, given: Any) -> float:
    """Run the notebook in a new kernel, and return the seconds that its search has printed."""
    cells = [text.replace("{workers}", str(workers)) for text in CELLS]
    cells = [text.replace("{seconds}", str(given.seconds)).replace("{trials}", str(given.trials)) for text in cells]
    book = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(text) for text in cells])
    with tempfile.TemporaryDirectory() as folder:
        client = nbclient.NotebookClient(book, kernel_name="python3", resources={"metadata": {"path": folder}})
        client.execute(env={**os.environ, "PYTHONPATH": str(ROOT)})
    return float(book.cells[-1].outputs[-1].text)


def main() -> None:
    """Measure both, and print the figures."""
    parser = make_parser(__doc__)
    parser.add_argument("--trials", type=count, default=100)
    parser.add_argument("--seconds", type=float, default=0.3, help="seconds of a trial")
    given = parser.parse_args()
    alone, beside = seconds_of(None, given), seconds_of(2, given)
    figures = {"serial_seconds": alone, "seconds_on_two_workers": beside}
    print(figures)
    finish(figures, {"serial / two workers": goal(alone / beside, at_least=1.7)}, vars(given))


if __name__ == "__main__":
    main()
