"""Commands that steer what runs: `stop` and others for a study, `drain` and `undrain` for a worker."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import click
from msgspec.structs import asdict

from shadho_celery.cli import connection_options, setting_options
from shadho_celery.cli.command import Command
from shadho_celery.cli.messages import say
from shadho_celery.cli.points import points
from shadho_celery.cli.result_options import json_option, print_json, store_option, study_argument
from shadho_celery.core.settings import KEPT
from shadho_celery.errors import UsageError
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.transport import urls

if TYPE_CHECKING:
    from shadho_celery.control.control import Control
    from shadho_celery.core.actions import Answer

F = TypeVar("F", bound=Callable[..., Any])

worker_argument = click.argument("worker", metavar="WORKER")


def _command(*examples: str) -> Callable[[F], click.Command]:
    """Return a decorator that makes a command with the options of all commands here, and with examples in its help."""
    lines = "\n".join(f"  {line}" for line in examples)

    def decorate(function: F) -> click.Command:
        for option in (connection_options.options, json_option):
            function = option(function)
        return click.command(cls=Command, epilog=f"\n\b\nExamples:\n{lines}\n")(function)

    return decorate


def _on_fleet(words: str) -> str:
    return f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery {words}"


@_command("shadho-celery stop svm-3f2a", _on_fleet("stop svm-3f2a"))
@study_argument
@store_option
def stop(name: str, **given: Any) -> None:
    """End the running study STUDY: start no more trials, and finish the running ones, as after one Ctrl-C.

    shadho-celery resume continues it.
    """
    _steer(given, lambda control: control.stop(name))


@_command("shadho-celery pause svm-3f2a", _on_fleet("pause svm-3f2a"))
@study_argument
@store_option
def pause(name: str, **given: Any) -> None:
    """Let the running study STUDY start no more trials until shadho-celery unpause. Its running trials finish.

    The study keeps its scheduler. The time for --seconds goes on.
    """
    _steer(given, lambda control: control.pause(name))


@_command("shadho-celery unpause svm-3f2a", _on_fleet("unpause svm-3f2a"))
@study_argument
@store_option
def unpause(name: str, **given: Any) -> None:
    """Let the paused study STUDY start trials again."""
    _steer(given, lambda control: control.unpause(name))


@_command("shadho-celery cancel svm-3f2a 12", _on_fleet("cancel svm-3f2a 12"))
@study_argument
@click.argument("number", metavar="TRIAL", type=click.IntRange(min=0))
@store_option
def cancel(name: str, number: int, **given: Any) -> None:
    """Cancel trial number TRIAL of the running study STUDY, whether it runs or waits.

    It ends CANCELLED and does not count towards --trials, so another trial takes its place.
    """
    _steer(given, lambda control: control.cancel(name, number))


@_command("shadho-celery enqueue svm-3f2a points.jsonl", _on_fleet("enqueue svm-3f2a points.jsonl"))
@study_argument
@click.argument("path", metavar="FILE", type=click.Path(path_type=Path))
@store_option
def enqueue(name: str, path: Path, **given: Any) -> None:
    """Let the running study STUDY run the known points in FILE before other trials.

    FILE is as for --enqueue of shadho-celery run: one JSON object per line, such as {"rate": 0.1}, or a JSON list.
    """
    found = points(path)
    _steer(given, lambda control: control.enqueue(name, found))


@_command(
    "shadho-celery set svm-3f2a --trials 200",
    "shadho-celery set svm-3f2a --seconds 7200 --early-stop 50",
    "shadho-celery set svm-3f2a --weight 3        # three times the slots of a study of weight 1",
    _on_fleet("set svm-3f2a --trials 200"),
)
@study_argument
@setting_options.changes
@store_option
def change(name: str, **given: Any) -> None:
    """Change settings of the running study STUDY. Later runs of it have the new values too.

    --trial-timeout applies to the trials that are sent from now on. A study that is already stopping does not change.
    """
    settings = {each: value for each in KEPT if (value := given[each]) is not None}
    _steer(given, lambda control: control.set(name, **settings))


@_command(
    "shadho-celery drain cpu@node7                # all workers of class cpu on node7",
    "shadho-celery drain cpu@node7.3817.0bdf      # one of them, by its name of shadho-celery status",
    _on_fleet("drain cpu@node7"),
)
@worker_argument
def drain(worker: str, **given: Any) -> None:
    """Let WORKER finish its trials and take no more, as before the maintenance of its machine.

    WORKER is CLASS@HOST, with a host of shadho-celery status: all workers of that class on that host. Those that start
    there later are drained too, until shadho-celery undrain. The full name of one of several workers there stands for
    that worker alone. No study needs to run.
    """
    _steer(given, lambda control: control.drain(worker))


@_command("shadho-celery undrain cpu@node7", _on_fleet("undrain cpu@node7"))
@worker_argument
def undrain(worker: str, **given: Any) -> None:
    """Let WORKER, which shadho-celery drain has drained, take trials again."""
    _steer(given, lambda control: control.undrain(worker))


def _steer(given: Mapping[str, Any], ask: Callable[[Control], Answer]) -> None:
    """Print the answer to a request. If it was refused, raise UsageError with the reason.

    The request is sent on the fleet that the options in `given` name, or to the embedded fleets of this folder.
    """
    connection = {name: given[name] for name in ("broker", "redis", "url_file", "signing_key_file")}
    os.environ.update(connection_options.environment(**connection))
    # Imported late, because `--help` needs none of it.
    from shadho_celery.control.control import Control

    answer = ask(Control(store=given.get("store", DEFAULT_STORE)))
    if given["as_json"]:
        print_json(asdict(answer))
        raise SystemExit(0 if answer.is_done else UsageError.exit_code)
    if not answer.is_done:
        raise UsageError(answer.text)
    say(answer.text)
