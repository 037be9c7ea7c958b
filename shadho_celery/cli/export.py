"""Command that writes a study's trials for other programs: `export`."""

from __future__ import annotations

import io
import json
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import IO, TYPE_CHECKING

import click

from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.core.files import replacing
from shadho_celery.core.units import counted
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from shadho_celery.results.study import StudyResults


def _csv(study: StudyResults, file: IO[bytes], *, plain: bool = False) -> None:
    text = io.TextIOWrapper(file, encoding="utf-8", newline="")
    study.write_csv(text, plain=plain)
    # Closing the wrapper would close the underlying binary file.
    text.detach()


def _json(study: StudyResults, file: IO[bytes]) -> None:
    """Write the study as one JSON object. Trials are read from the store and written one by one."""
    from shadho_celery.results.schema import plain_json, trial_json

    head = plain_json({"study": study.name, "module": study.module, "seed": study.seed, "space": study.space})
    file.write(f'{json.dumps(head)[:-1]}, "trials": ['.encode())
    for place, trial in enumerate(study.trials):
        file.write(f"{',' if place else ''}\n{json.dumps(plain_json(trial_json(trial)))}".encode())
    file.write(b"\n]}\n")


def _parquet(study: StudyResults, file: IO[bytes]) -> None:
    try:
        study.dataframe().to_parquet(file, index=False)
    except ImportError:
        raise UsageError('parquet needs pyarrow; in the checkout: pip install -e ".[export]"') from None


WRITERS: Mapping[str, Callable[[StudyResults, IO[bytes]], None]] = {"csv": _csv, "json": _json, "parquet": _parquet}


@click.command(
    epilog="""
\b
Examples:
  shadho-celery export svm -o trials.csv
  shadho-celery export svm --format json > trials.json
  shadho-celery export svm -o trials.parquet
\b
csv and parquet are tables with one row per trial, and one column per label and metric. parquet
needs pandas and pyarrow: pip install -e ".[export]" in the checkout
\b
A text in csv that begins with =, +, -, @, a tab or a carriage return gets an apostrophe in front, because
a spreadsheet would run it as a formula. A text that begins with an apostrophe gets another one.
--warm-start removes these apostrophes again; --plain writes none.
"""
)
@study_argument
@click.option(
    "--format", "kind", type=click.Choice([*WRITERS]), help="Format of the file.  [default: by FILE's name, else csv]"
)
@click.option("-o", "--output", type=click.Path(path_type=Path, dir_okay=False), metavar="FILE", help="File to write.")
@click.option("--plain", is_flag=True, help="Write texts in csv unchanged, for programs other than spreadsheets.")
@store_option
def export(name: str, kind: str | None, output: Path | None, plain: bool, store: str) -> None:
    """Write all trials of a study to FILE, or to standard output."""
    ending = output.suffix[1:].lower() if output else ""
    if kind is None and ending and ending not in WRITERS:
        raise UsageError(f"there is no format for names that end with .{ending}; give --format {', '.join(WRITERS)}")
    kind = kind or ending or "csv"
    if plain and kind != "csv":
        raise UsageError(f"--plain is for csv; leave it out for {kind}")
    write = partial(_csv, plain=True) if plain else WRITERS[kind]
    if output is None and kind == "parquet" and sys.stdout.isatty():
        raise UsageError("parquet is a binary format and cannot be shown in a terminal; give -o FILE")
    with opened(store, name) as study:
        if output is None and sys.stdout.isatty():
            shown = io.BytesIO()
            write(study, shown)
            say(shown.getvalue().decode(), nl=False)
            return
        if output is None:
            write(study, sys.stdout.buffer)
            sys.stdout.buffer.flush()
            return
        # An existing file is replaced only when the new one is complete.
        try:
            with replacing(output) as file:
                write(study, file)
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}; give -o another FILE") from None
        say(f"{counted(len(study.trials), 'trial')} of study {study.name} written to {output}", err=True)
