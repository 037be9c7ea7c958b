"""Options and functions that the commands about recorded studies share."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import click

from shadho_celery.cli.messages import say
from shadho_celery.cli.shared_options import warn_of_password
from shadho_celery.core.checks import printable_json
from shadho_celery.errors import ShadhoError
from shadho_celery.store.base import DEFAULT_STORE

if TYPE_CHECKING:
    from shadho_celery.results.study import StudyResults

#: environment variable with the URL of the store
STORE_VARIABLE = "SHADHO_STORE"

store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    envvar=STORE_VARIABLE,
    show_default=True,
    metavar="URL",
    help=f"Database that keeps the trials.  [env: {STORE_VARIABLE}]",
)
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output."
)


def _complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the studies that begin with `incomplete`, for completion with the Tab key."""
    from shadho_celery.store.sql import SqlStore

    with suppress(ShadhoError):
        records = SqlStore(context.params.get("store") or DEFAULT_STORE, read_only=True).records()
        return [record.name for record in records if record.name.startswith(incomplete) and record.name.isprintable()]
    return []


study_argument = click.argument("name", metavar="STUDY", shell_complete=_complete)


@contextmanager
def opened(store: str, name: str, *, exactly: bool = False) -> Iterator[StudyResults]:
    """Open the study called `name`, which may be shortened. At the end, print a note if values were shown as texts.

    Unless `exactly`, `name` may also be a module, for its latest study. That study is then named on standard error.
    """
    # Imported late: the database's library takes a third of a second.
    from shadho_celery.results.study import StudyResults
    from shadho_celery.store.sql import SqlStore

    warn_of_password("--store", store, "PGPASSWORD or ~/.pgpass")
    found = SqlStore(store, read_only=True)
    study = StudyResults(found, found.find(name, told=None if exactly else partial(say, err=True)))
    yield study
    if study.values_note:
        say(f"Warning: {study.values_note}", err=True)


def print_json(found: Mapping[str, Any]) -> None:
    """Print one JSON object in one line."""
    from shadho_celery.results.schema import plain_json

    say(printable_json(json.dumps(plain_json(found), ensure_ascii=False, allow_nan=False)))


def moment(seconds: float | None) -> str:
    """Return a moment (seconds since the epoch) as text in local time; "-" for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
