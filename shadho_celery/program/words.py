"""Errors in Python's words: messages of the rooms below name options of the command line."""

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

from shadho_celery.core.checks import printable
from shadho_celery.errors import ShadhoError

#: options in messages, and what they are called in a program; the first that fits
_WORDS = (
    (re.compile(r"see --help"), "see help(shadho_celery.minimize)"),
    (re.compile(r"give --resume (\S+) --repair"), r"run python -m shadho_celery.launch with --resume \1 --repair"),
    (re.compile(r"--resume (?!takes\b|finds\b)'?[\w.#?%-]+'?(?= (?:or|takes|finds))"), "resume=True"),
    (re.compile(r"--resume\b"), "resume=True"),
    (re.compile(r"another --study(?: name| NAME)?"), "another name (study=)"),
    (re.compile(r"--study(?: NAME| name)?"), "study="),
    (re.compile(r"--workers ([\w.-]+)=(\d+)"), r'workers={"\1": \2}'),
    (re.compile(r"--seed \d+; leave --seed out"), "another seed; leave seed out"),
    (re.compile(r"(?<![\w-])--([a-z]+(?:-[a-z]+)*)"), lambda found: found[1].replace("-", "_") + "="),
)

#: packages whose frames lie between a caller and a warning: this one, and that of the decorator `python_words`
_OURS = {__name__.partition(".")[0], "contextlib"}


def in_python(text: str) -> str:
    """Return a message with the arguments of a function in place of a command's options."""
    if "shadho_celery.launch" in text:
        return text
    for pattern, words in _WORDS:
        text = pattern.sub(words, text)
    return text


@contextmanager
def python_words() -> Iterator[None]:
    """Put the message of a ShadhoError into Python's words; a decorator of functions, too."""
    try:
        yield
    except ShadhoError as error:
        error.args = tuple(in_python(each) if isinstance(each, str) else each for each in error.args)
        raise


def warn(text: str) -> None:
    """Warn, naming the line outside of this package that has called it."""
    level, frame = 1, inspect.currentframe()
    while frame is not None and frame.f_globals.get("__name__", "").partition(".")[0] in _OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(printable(text), stacklevel=level)
