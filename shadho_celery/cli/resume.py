"""Command that continues a study by its name, without the name of its study file: `resume`."""

from __future__ import annotations

import sys

import click

from shadho_celery.cli.group import commands
from shadho_celery.cli.result_options import opened, store_option, study_argument
from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError


@click.command(
    context_settings={"ignore_unknown_options": True},
    epilog="""
\b
Examples:
  shadho-celery resume svm-3f2a
  shadho-celery resume svm --trials 80
""",
)
@study_argument
@click.argument("options", nargs=-1, type=click.UNPROCESSED)
@store_option
def resume(name: str, options: tuple[str, ...], store: str) -> None:
    """Continue STUDY, ended or interrupted, in the folder of its study file; OPTIONS are those of run.

    A study that has reached its limit needs a new one, such as --trials 80.
    """
    from shadho_celery.study.open import check_continues  # needs numpy and SQLAlchemy, and no help does

    with opened(store, name) as study:
        module, found = study.module, study.name
        check_continues(found, is_simulated=study.is_simulated)
    if not module:
        raise UsageError(
            f"study {found!r} has no study file: a program ran it, and continues it with minimize(..., resume=True)"
        )
    parts = module.split(".")
    if not all(map(str.isidentifier, parts)) or parts[0] in sys.stdlib_module_names:
        raise UsageError(
            f"study {found!r} names {short(module)} as its study file; give the file: run FILE --resume {found}"
        )
    # With =, because a name may begin like an option.
    words = ["run", module, f"--resume={found}", f"--store={store}", *options]
    commands.main(words, prog_name="shadho-celery", standalone_mode=False)
