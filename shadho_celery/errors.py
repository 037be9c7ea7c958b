"""Errors for users.

::

    ShadhoError
    ├── SpaceError            the search space cannot be searched as written
    ├── UsageError            a command or its arguments are invalid
    │   ├── NestedStart       a study on workers is started by an import or a trial
    │   └── NoTrialToAsk      all points have been tried, or the next trial depends on open ones
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

A message names a setting or an argument by its name in STUDY and in Python, such as early_stop. The option of a command
is the same name with dashes, such as --early-stop.

NoSuccessfulTrial is also a ValueError, and StudyNotFound is also a KeyError, because programs written for Optuna expect
these.
"""

from __future__ import annotations


class ShadhoError(Exception):
    """Something went wrong; this is a bug if it is all you see."""

    #: exit code of a command that ends with this error
    exit_code = 2

    def __init__(self, message: str | None = None) -> None:
        super().__init__(message or (type(self).__doc__ or "").strip())


class SpaceError(ShadhoError):
    """The search space cannot be searched as it is written."""


class UsageError(ShadhoError):
    """The arguments do not fit together."""


class NestedStart(UsageError):
    """A study on workers cannot be started while a study file is imported, or within a trial."""


class NoTrialToAsk(UsageError):
    """There is no trial to ask for: all points have been tried, or the results of trials that are open are missing."""


class StudyError(ShadhoError):
    """The study cannot be opened."""


class StudyNotFound(StudyError, KeyError):
    """There is no such study in this store; start a new one, without resuming."""

    # The method of KeyError would put the message in quotes.
    __str__ = Exception.__str__


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


class NoSuccessfulTrial(ShadhoError, ValueError):
    """There is no successful trial: every trial failed or was pruned; the report above and the store say why."""

    exit_code = 1
