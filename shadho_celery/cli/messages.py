"""Output of the commands, in which control characters are escaped.

Commands print only through this module and `tables.PrintableConsole`, because a text from a store, from Redis or from a
trial may contain control codes for the terminal.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress
from typing import TextIO

import click

from shadho_celery.core.checks import one_line, printable


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text on standard output, or with `err` on standard error. Control characters are escaped.

    A failed write to standard error, for example on a full disk, is ignored, so that a program's search continues.
    """
    with suppress(OSError) if err else nullcontext():
        click.echo(printable(str(text)), err=err, nl=nl)


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Show each UserWarning as a message to the user, without the line of code that has caused the warning."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def readable(  # noqa: PLR0917 -- Python passes them by position
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            # Other warnings, such as a DeprecationWarning, are for the developer, and are shown as usual.
            if category is UserWarning:
                say(f"Warning: {one_line(message, 1000)}", err=True)
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = readable
        yield
