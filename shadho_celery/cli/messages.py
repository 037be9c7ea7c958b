"""Messages on standard error that a library begins: its warnings, in one line each."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TextIO

import click

from shadho_celery.core.checks import one_line


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
            # Others, such as a DeprecationWarning, are for whoever maintains that line.
            if category is UserWarning:
                click.echo(f"Warning: {one_line(message, 1000)}", err=True)
            else:
                show(message, category, filename, lineno, file, line)

        warnings.showwarning = readable
        yield
