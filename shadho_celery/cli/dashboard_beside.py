"""The dashboard beside a run (`run --dashboard`): a process of its own, which ends with the run."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from importlib.util import find_spec

from shadho_celery.cli.result_options import STORE_VARIABLE
from shadho_celery.errors import UsageError

#: seconds for which the dashboard may take to end
END_SECONDS = 5.0
#: text before the URL in the line that it prints first
_SAID = "dashboard: "


@contextmanager
def dashboard_beside(store: str, environment: Mapping[str, str], say: Callable[[str], None]) -> Iterator[None]:
    """Serve the studies of a store on web pages, and `say` their URL once. Raises UsageError without its packages.

    `environment` is that of the command, before it knows of servers of its own.
    """
    if find_spec("starlette") is None or find_spec("uvicorn") is None:
        raise UsageError('--dashboard needs the extra dashboard; in the checkout: pip install -e ".[dashboard]"')
    # By a variable, because a URL may have a password, and other users see the arguments of a process.
    process = subprocess.Popen(
        [sys.executable, "-m", "shadho_celery", "dashboard", "--port", "0", "--with-parent"],
        env={**environment, STORE_VARIABLE: store},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        # Ctrl-C is for the run.
        start_new_session=True,
    )
    reader = threading.Thread(target=_pass_on, args=(process, say), daemon=True)
    reader.start()
    try:
        yield
    finally:
        process.terminate()
        with suppress(subprocess.TimeoutExpired):
            process.wait(END_SECONDS)
        process.kill()
        process.wait()
        reader.join(END_SECONDS)


def _pass_on(process: subprocess.Popen[str], say: Callable[[str], None]) -> None:
    """Say the first URL, or why there is none. Read all other lines, so that the process never waits for a reader."""
    is_said = False
    for line in process.stdout or ():
        if not is_said and line.startswith((_SAID, "Error")):
            is_said = True
            say(line.strip())
