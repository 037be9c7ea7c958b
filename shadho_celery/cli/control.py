"""Commands that steer what runs: `stop` and others for a study, `drain` and `undrain` for a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict

from shadho_celery.cli import connection_options, setting_options
from shadho_celery.cli.command import Command
from shadho_celery.cli.messages import say
from shadho_celery.cli.points import points
from shadho_celery.cli.result_options import json_option, print_json, store_option, study_argument
from shadho_celery.core.actions import Deed, name_of
from shadho_celery.core.settings import KEPT
from shadho_celery.errors import UsageError
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.transport import urls

#: by the name of an argument, the arguments or options of its command
_PARAMETERS: Mapping[str, Callable[..., Any]] = {
    "number": click.argument("number", metavar="TRIAL", type=click.IntRange(min=0)),
    "points": click.argument("points", metavar="FILE", type=click.Path(path_type=Path)),
    "settings": setting_options.changes,
    "worker": click.argument("worker", metavar="WORKER"),
}


def command(kind: type[Deed]) -> click.Command:
    """Return the command of an action."""

    def run(**given: Any) -> None:
        _act(kind(**{each: _argument(each, given) for each in kind.__struct_fields__}), given)

    made: Callable[..., None] = run
    parts = [_PARAMETERS[each] for each in kind.__struct_fields__]
    parts = [study_argument, *parts, store_option] if kind.scope != "worker" else parts
    for add in (*reversed(parts), connection_options.options, json_option):
        made = add(made)
    lines = [f"shadho-celery {each}" for each in kind.examples]
    lines.append(f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery {kind.examples[0].partition('  ')[0]}")
    epilog = "\n".join(["", "\b", "Examples:", *(f"  {line}" for line in lines), ""])
    return click.command(name_of(kind), cls=Command, help=cleandoc(kind.__doc__ or ""), epilog=epilog)(made)


def _argument(name: str, given: Mapping[str, Any]) -> Any:
    """Return an argument of an action, made from the values of its command."""
    match name:
        case "points":
            return points(given[name])
        case "settings":
            return {each: value for each in KEPT if (value := given[each]) is not None}
    return given[name]


def _act(deed: Any, given: Mapping[str, Any]) -> None:
    """Ask for an action, and print the answer. If it was refused, raise UsageError with the reason.

    The request is sent on the fleet that the options in `given` name, or to the embedded fleets of this folder.
    """
    connection = {name: given[name] for name in ("broker", "redis", "url_file", "signing_key_file")}
    os.environ.update(connection_options.environment(**connection))
    # Imported late, because `--help` needs none of it.
    from shadho_celery.control.control import Control

    answer = Control(store=given.get("store", DEFAULT_STORE)).act(deed, given.get("name", ""))
    if given["as_json"]:
        print_json(asdict(answer))
        raise SystemExit(0 if answer.is_done else UsageError.exit_code)
    if not answer.is_done:
        raise UsageError(answer.text)
    say(answer.text)
