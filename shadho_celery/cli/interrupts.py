"""End of a command without a traceback while it starts: at Ctrl-C, or if a file hides a library that it imports."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from shadho_celery.core.libraries import failed_import, is_import

#: exit code after Ctrl-C, as in shells: 128 plus the signal's number
INTERRUPTED = 130


def end_quietly() -> None:
    """Install a hook that ends this process without a traceback, at Ctrl-C or if a file hides a library.

    It is for the time in which modules are imported. Once a command runs, `connection_options.refusals` does this.
    """
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Not raised again, because Python would then end the process by the signal.
        os._exit(INTERRUPTED)
    if is_import(error) and (told := failed_import(error)):
        sys.stderr.write(f"Error: {told}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.__excepthook__(kind, error, trace)
