"""The console command ``shadho-celery``, which is also ``python -m shadho_celery``."""

from __future__ import annotations

from shadho_celery.cli.interrupts import end_quietly, ending_quickly


def main() -> None:
    """Run the command line."""
    end_quietly()
    with ending_quickly():
        from shadho_celery.cli.group import commands

        commands(prog_name="shadho-celery")
