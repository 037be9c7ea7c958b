"""Values that the objective of a recorded trial got, in the space's own shape."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import cached_property
from typing import Any

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Params
from shadho_celery.errors import ShadhoError
from shadho_celery.objective import study_file
from shadho_celery.space.stored import RestoredSpace
from shadho_celery.store.base import StudyRecord

#: computes values from params
Evaluate = Callable[[Params], Any]


class Values:
    """Computes values from params: with the space in the store, else with that of the study's module, else as texts."""

    def __init__(self, record: StudyRecord, evaluate: Evaluate | None = None) -> None:
        """`evaluate` is the method of the study's space, if it is available."""
        self._record = record
        self._evaluate = evaluate
        #: reason why some values are texts, with the remedy; None as long as all are the values that the objective got
        self.note: str | None = None

    def of(self, params: Params) -> Any:
        """Return the values for these params; `note` then says whether they are texts."""
        if self._evaluate is not None:
            return self._evaluate(params)
        value, is_exact = self._restored.evaluate(params) if self._restored else (dict(params), False)
        if is_exact:
            return value
        evaluate = self._of_module
        if evaluate is None:
            return value
        try:
            return evaluate(params)
        except Exception as error:  # a space may call any function
            self.note = f"the space of {self._record.module} fails on these params: {short(error)}"
            return value

    def shown(self, params: Params, label: str) -> Any:
        """Return the value of one active label as a table shows it.

        The value None becomes a text, because None in a table stands for an inactive label.
        """
        value = self._restored.shown(params, label) if self._restored else params[label]
        return "None" if value is None else value

    @cached_property
    def _restored(self) -> RestoredSpace | None:
        """The space that the store has; None if it has no space, or the space cannot be read."""
        if self._record.tree is None:
            return None
        try:
            return RestoredSpace(self._record.tree)
        except (ValueError, TypeError, RecursionError):
            return None

    @cached_property
    def _of_module(self) -> Evaluate | None:
        """Function that evaluates params with the space of the study's module; None, with a note, if there is none.

        The module is used only if this program has imported it itself, because a stranger's store may name any module.
        """
        name = self._record.module
        if not name:
            self.note = "some values are shown as texts: they are objects that exist only in the study's own program"
            return None
        if name not in sys.modules:
            self.note = f"some values are shown as texts: import {name} in the program first to get the objects"
            return None
        from shadho_celery.space.compile import compile_space

        try:
            space = compile_space(study_file.load(name).space)
        except ShadhoError as error:
            self.note = f"some values are shown as texts: {error}"
            return None
        if space.describe() != dict(self._record.space):
            self.note = f"some values are shown as texts: {name} now has another search space"
            return None
        return space.evaluate
