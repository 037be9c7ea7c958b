"""The console command ``shadho-celery``, which is also ``python -m shadho_celery``."""

from __future__ import annotations

import io
import sys

from shadho_celery.cli.interrupts import end_quietly, ending_quickly


def main() -> None:
    """Run the command line."""
    end_quietly()
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):
            # A trial's text may have an unpaired surrogate, or characters that the terminal's encoding lacks.
            stream.reconfigure(errors="backslashreplace")
    with ending_quickly():
        from shadho_celery.cli.group import commands

        commands(prog_name="shadho-celery")
