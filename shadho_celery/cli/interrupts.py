"""Ctrl-C while a command starts, and files that hide what it imports: the end without a traceback."""

from __future__ import annotations

import os
import sys
from types import TracebackType

from shadho_celery.core.libraries import failed_import, is_import

#: exit code after Ctrl-C, as shells have it: 128 and the signal's number
INTERRUPTED = 130


def end_quietly() -> None:
    """Have Ctrl-C end this process without a traceback while its modules are imported; and a file that hides one.

    `connection_options.refusals` does so once a command runs.
    """
    sys.excepthook = _hook


def _hook(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    if issubclass(kind, KeyboardInterrupt):
        # Python would end the process by the signal itself.
        os._exit(INTERRUPTED)
    if is_import(error) and (told := failed_import(error)):
        sys.stderr.write(f"Error: {told}\n")
        sys.stderr.flush()
        os._exit(2)
    sys.__excepthook__(kind, error, trace)
