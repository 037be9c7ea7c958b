"""What the commands print: texts, tables and warnings, all of them printable.

No other module of the package writes to a terminal: a text of a store, of Redis or of a trial may have codes that a
terminal obeys.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from shadho_celery.core.checks import one_line, printable


def say(text: object = "", *, err: bool = False, nl: bool = True) -> None:
    """Print a text, printable, on standard output, or on standard error."""
    click.echo(printable(str(text)), err=err, nl=nl)


@contextmanager
def readable_warnings() -> Iterator[None]:
    """Show a UserWarning as a message to the user: its text is the news, and its line of code is not."""
    with warnings.catch_warnings():
        show = warnings.showwarning

        def readable(  # noqa: PLR0917 -- Python calls it so
            message: Warning | str,
            category: type[Warning],
            filename: str,
            lineno: int,
            file: TextIO | None = None,
            line: str | None = None,
        ) -> None:
            # Others, such as a DeprecationWarning, are for the maintainer of that line.
            if category is UserWarning:
                say(f"Warning: {one_line(message, 1000)}", err=True)
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = readable
        yield
