"""Command that writes a study's report as one HTML file: `report`."""

from __future__ import annotations

from pathlib import Path

import click

from shadho_celery.cli.messages import say
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.core.files import replacing
from shadho_celery.errors import UsageError


@click.command(
    epilog="""
\b
Examples:
  shadho-celery report svm
  shadho-celery report svm -o svm.html
  shadho-celery report svm --store postgresql://me@db/searches
\b
The file opens in any browser, without a network. It has at most 2 MB of data, whatever the size of the
study: of large studies, fewer marks are drawn, and each chart says by which rule.
"""
)
@study_argument
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path, dir_okay=False),
    default="report.html",
    show_default=True,
    metavar="FILE",
    help="File to write; an existing one is replaced.",
)
@store_option
def report(name: str, output: Path, store: str) -> None:
    """Write a report with charts to FILE: one HTML file, also while the study runs."""
    # Imported late, because the charts take a third of a second.
    from shadho_celery.pages.reading import StudyData
    from shadho_celery.pages.report import report_html

    with opened(store, name) as study:
        text = report_html(StudyData(study))
        # An existing file is replaced only when the new one is complete.
        try:
            with replacing(output) as file:
                file.write(text.encode())
        except OSError as error:
            raise UsageError(f"{output} cannot be written: {error.strerror}; give -o another FILE") from None
        say(f"report of study {study.name} written to {output}", err=True)
