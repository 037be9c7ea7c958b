"""Errors for users.

::

    ShadhoError
    ├── SpaceError            the search space cannot be searched as written
    ├── UsageError            a command or its arguments are invalid
    │   └── NestedStart       a study on workers is started by an import or a trial
    ├── StudyError            the study cannot be opened or resumed
    │   ├── StudyNotFound
    │   ├── StudyExists
    │   ├── StudyLocked       another scheduler runs it
    │   ├── LockLost          another scheduler has taken its lock
    │   └── SpaceChanged      the stored study searches another space
    ├── StoreError            the store cannot be read or written
    │   └── StoreOutage       its server cannot be reached; a running study tries again
    ├── ServiceError          the broker or Redis cannot be reached or used
    └── NoSuccessfulTrial     the study ended without a loss

The docstring of a class is its default message. Each message names the cause and the remedy in one line.

A message may name what its reader writes: an option, an argument, or a key of STUDY. It is then a template with a
`Words` value for each such name, as in logging: ``UsageError("%s must be above 0", TRIALS)``. Each interface fills in
its own words.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from enum import Enum, auto


class Surface(Enum):
    """Interface through which a user gives settings. It decides how a message names them."""

    #: options of a command
    COMMAND = auto()
    #: arguments of a function that runs trials in its own process
    PYTHON = auto()
    #: arguments of a function that runs a study file on workers
    WORKERS = auto()


@dataclass(frozen=True)
class Words:
    """Names of a setting or an argument in each interface, as a user writes them."""

    command: str
    python: str
    #: "" if it equals `python`
    workers: str = ""
    #: name of the setting in STUDY; "" for an argument that a study file cannot have
    setting: str = ""

    def on(self, surface: Surface, stated: Collection[str] = ()) -> str:
        """Return what a user of this interface writes. `stated` are the names of the settings from the study file."""
        if self.setting in stated:
            return f'STUDY["{self.setting}"]'
        if surface is Surface.COMMAND:
            return self.command
        return self.workers or self.python if surface is Surface.WORKERS else self.python

    def __str__(self) -> str:
        return self.command


@dataclass(frozen=True)
class Message:
    """A text for users: a template, and the values for each ``%s`` in it. Without values the template is the text."""

    template: str
    values: tuple[object, ...] = ()

    def on(self, surface: Surface, stated: Collection[str] = ()) -> str:
        """Return the text with the words of an interface; `stated` is as in `Words.on`."""
        said = (
            each.on(surface, stated) if isinstance(each, Words | Message | ShadhoError) else each
            for each in self.values
        )
        return self.template % tuple(said) if self.values else self.template

    def __str__(self) -> str:
        return self.on(Surface.COMMAND)


class ShadhoError(Exception):
    """Something went wrong; this is a bug if it is all you see."""

    #: exit code of a command that ends with this error
    exit_code = 2
    #: interface whose user reads the message; and the names of the settings from the study file
    surface: Surface | None = None
    stated = frozenset[str]()

    def __init__(self, message: str | None = None, *values: object) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip(), *values)

    def __str__(self) -> str:
        return self.on(self.surface or Surface.COMMAND, self.stated)

    def on(self, surface: Surface, stated: Collection[str] = ()) -> str:
        """Return the message with the words of an interface; `stated` is as in `Words.on`."""
        return Message(self.args[0], self.args[1:]).on(surface, stated)

    @property
    def setting(self) -> str:
        """Name of the first setting that the message names, or ""."""
        return next((each.setting for each in self.args if isinstance(each, Words | ShadhoError) and each.setting), "")


class SpaceError(ShadhoError):
    """The search space cannot be searched as it is written."""


class UsageError(ShadhoError):
    """The arguments do not fit together."""


class NestedStart(UsageError):
    """A study on workers cannot be started while a study file is imported, or within a trial."""


class StudyError(ShadhoError):
    """The study cannot be opened."""


class StudyNotFound(StudyError):
    """There is no such study in this store; start a new one, without resuming."""


class StudyExists(StudyError):
    """A study of this name is in the store already; resume it or choose another name."""


class StudyLocked(StudyError):
    """Another scheduler runs this study; stop it first, or give this one another name."""


class LockLost(StudyError):
    """Another scheduler has taken this study's lock; this one stops and has written nothing since."""


class SpaceChanged(StudyError):
    """The study to resume searches another space; begin another study, or restore the space."""


class StoreError(ShadhoError):
    """The store cannot be read or written; check its URL."""


class StoreOutage(StoreError):
    """The store's server cannot be reached at the moment; see that it runs."""


class ServiceError(ShadhoError):
    """A broker or Redis cannot be reached; check that it runs and that the URL is right."""


class NoSuccessfulTrial(ShadhoError):
    """There is no successful trial: every trial failed or was pruned; the report above and the store say why."""

    exit_code = 1


@contextmanager
def told(surface: Surface, stated: Collection[str] = ()) -> Iterator[None]:
    """Let the message of a ShadhoError that is raised in the block use the words of an interface. Also a decorator.

    With nested blocks, the interface of the innermost one applies. `stated` are the names of the settings from the
    study file.
    """
    try:
        yield
    except ShadhoError as error:
        error.surface = error.surface or surface
        error.stated |= {*stated}
        raise
