"""Commands that act on a running study or on a worker, and the reader of files of known points (params to run first).

There is one command for each action in `core.records.ACTIONS`, such as `stop` or `drain`. Files of known points are
read by `run --enqueue` and `enqueue`.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Mapping
from functools import partial
from inspect import cleandoc
from pathlib import Path
from typing import Any

import click
from msgspec.structs import asdict, replace

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.core.checks import is_shallow, one_line, short
from shadho_celery.core.files import MAX_NESTED, read_text
from shadho_celery.core.records import Answer, Clean, Deed, name_of
from shadho_celery.core.settings import KEPT
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.store.base import DEFAULT_STORE

#: remedy in error messages: describes the format of a file of known points
FORM = 'write one JSON object a line, such as {"rate": 0.1}, or one list of them'


def points(path: Path) -> list[object]:
    """Return the known points in a file. An error message names the file, and the line that is not JSON."""
    return points_in(read_text(path, f"the points in {path}", FORM), str(path))


def points_in(text: str, where: str) -> list[object]:
    """Return the known points in `text`, which error messages call `where`. Raises UsageError if it is not JSON."""
    if text.lstrip().startswith("["):
        found = _parsed(text, where)
        return found if isinstance(found, list) else [found]
    # splitlines is not used, because it also splits at U+2028 and U+0085, which a JSON text may contain.
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, f"line {number} of {where}") for number, line in lines if line.strip()]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raises ValueError if a name occurs twice, because its value is then ambiguous."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{short(name)} occurs twice in one object")
    return found


def _parsed(text: str, where: str) -> object:
    try:
        parsed: object = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({one_line(error)}); {FORM}") from None
    if not is_shallow(parsed, MAX_NESTED):
        raise UsageError(f"{where} has more than {MAX_NESTED} levels; {FORM}")
    return parsed


_failed_option = click.option(
    "--failed",
    is_flag=True,
    help="Instead of a FILE: the params of failed trials, as after a fix; of those whose numbers follow, by default of "
    "all that were not tried again. If the study does not run, its next run begins with them.",
)

#: by the name of an argument, the arguments or options of its command
_PARAMETERS: Mapping[str, Callable[..., Any]] = {
    "number": click.argument("number", metavar="TRIAL", type=click.IntRange(min=0)),
    "points": lambda made: click.argument("words", metavar="[FILE]", nargs=-1)(_failed_option(made)),
    "settings": partial(shared_options.study_options, is_change=True),
    "text": click.argument("text", metavar="TEXT"),
    "trial": click.option("--trial", type=click.IntRange(min=0), metavar="N", help="Number of the trial."),
    "worker": click.argument("worker", metavar="WORKER"),
    "studies": click.argument("studies", metavar="[STUDY]...", nargs=-1),
    "is_sure": click.option("-y", "--yes", "is_sure", is_flag=True, help="Do not ask."),
}


def command(kind: type[Deed]) -> click.Command:
    """Return the command that requests an action."""

    def run(**given: Any) -> None:
        answer = None
        if "words" in given:
            given["points"], answer = _points(given)
        given["settings"] = {each: value for each in KEPT if (value := given.get(each)) is not None}
        answer = answer or _asked(kind(**{each: given[each] for each in kind.__struct_fields__}), given)
        if given["as_json"]:
            shared_options.print_json(asdict(answer))
            raise SystemExit(0 if answer.is_done else UsageError.exit_code)
        if not answer.is_done:
            raise UsageError(answer.text)
        say(answer.text)

    made: Callable[..., None] = run
    parts = [_PARAMETERS[each] for each in kind.__struct_fields__]
    parts = [shared_options.study_argument, *parts] if kind.scope not in {"worker", "fleet"} else parts
    parts = [*parts, shared_options.store_option] if kind.scope != "worker" else parts
    for add in (*reversed(parts), shared_options.on_fleet, shared_options.json_option):
        made = add(made)
    on_fleet = f"{urls.REDIS}=redis://127.0.0.1/0 shadho-celery {kind.examples[0].partition('  ')[0]}"
    texts = {"name": name_of(kind), "help": cleandoc(kind.__doc__ or "")}
    return shared_options.command(*kind.examples, on_fleet, **texts)(made)


def _points(given: Mapping[str, Any]) -> tuple[list[Any], Answer | None]:
    """Return the known points in a file, or the params of failed trials; and the answer to the command, or None.

    There is an answer if the study of the failed trials does not run, because their params are then enqueued here.
    """
    words = given["words"]
    if given["failed"]:
        # Imported late, because `--help` needs none of it.
        from shadho_celery.cli.again import enqueued, failed_params

        with shared_options.opened(given["store"], given["name"]) as study:
            found = failed_params(study, words)
            return found, None if study.running_on else enqueued(study, given["store"], found)
    if len(words) != 1:
        raise UsageError("give one FILE of known points, or --failed")
    return points(Path(words[0])), None


def _asked(deed: Any, given: Mapping[str, Any]) -> Answer:
    """Request an action, and return the answer.

    The request goes to the fleet whose URLs are in the environment, else to the embedded fleets of this folder.
    """
    # Imported here, so that `--help` stays fast.
    from shadho_celery.session.control import Control

    control = Control(store=given.get("store", DEFAULT_STORE))
    answer = control.act(deed, given.get("name", ""))
    if isinstance(deed, Clean) and not (answer.is_done or given["as_json"]):
        say(answer.text)
        shared_options.confirm(deed.question)
        answer = control.act(replace(deed, is_sure=True))
    return answer
