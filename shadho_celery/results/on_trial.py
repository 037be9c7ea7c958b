"""A user's function that is called after each trial: `on_trial(study, trial)`."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import accepts, one_line, short
from shadho_celery.core.trial import Trial
from shadho_celery.errors import UsageError
from shadho_celery.results.study import RunningStudy
from shadho_celery.results.trial import TrialResult

_PACKAGE = Path(__file__).parents[1]

#: called with the study and one of its ended trials
OnTrial = Callable[[RunningStudy, TrialResult], Any]


class TrialCallback:
    """Calls the user's function with each ended trial. If it raises, the study continues.

    Exceptions that come from the same line of code are reported once.
    """

    def __init__(self, function: OnTrial, study: RunningStudy, say: Callable[[str], None]) -> None:
        self._function = function
        self._study = study
        self._say = say
        self._said: set[str] = set()

    def __call__(self, trial: Trial) -> None:
        """Call the user's function with a recorded trial."""
        try:
            self._function(self._study, self._study.result_of(trial))
        except (Exception, SystemExit) as error:
            where = _line(error)
            if where not in self._said:
                self._said.add(where)
                self._say(f"on_trial failed after trial {trial.number}: {_cause(error)} ({where}); the study continues")


def check_on_trial(function: object, where: str) -> None:
    """Raise UsageError unless `function` can be called with a study and a trial, or is None. `where` is its name."""
    if function is None:
        return
    if not callable(function):
        raise UsageError(f"{where} is not a function but {short(function, 60)}; write def on_trial(study, trial)")
    if not accepts(function, 2):
        raise UsageError(f"{where} does not take a study and a trial; write def on_trial(study, trial)")


def _cause(error: BaseException) -> str:
    try:
        return f"{type(error).__name__}: {one_line(error)}"
    except Exception:  # its own __str__ may do anything
        return type(error).__name__


def _line(error: BaseException) -> str:
    """Return the last line of the traceback in the user's code, or the last line at all if there is none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = [frame for frame in frames if not Path(frame.filename).is_relative_to(_PACKAGE)]
    last = (own or frames)[-1]
    return f"{last.filename}, line {last.lineno}: {last.line}"
