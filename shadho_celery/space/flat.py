"""Plain values of a trial by label, for the arguments of a command."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.space import tree
from shadho_celery.space.describe import option_names, option_tags, outermost_calls
from shadho_celery.space.space import Space

#: types of the values that an argument can hold
SCALARS = (bool, int, float, str, type(None))


class FlatValues:
    """Called with a trial's params, returns the value of each active label: a number, a text, True, False or None.

    The value of a choice is the chosen option. If this option has labels, or is a dict or a tuple, it is the option's
    name. The value of a label that is used in exactly one expression, such as ``scope.int(...)``, is the value of this
    expression.
    """

    def __init__(self, space: Space) -> None:
        #: labels of choices with an option that is not a plain value and has no name
        self.nested: set[str] = set()
        self._options = {label: self._plain(label, switch.options) for label, switch in space.switches.items()}
        calls = {label: {*found} for label, found in outermost_calls(space.root).items() if label not in self._options}
        self._calls = {label: found.pop() for label, found in calls.items() if len(found) == 1}
        self._whole = space.whole

    def __call__(self, params: Params) -> Mapping[str, Any]:
        memo: tree.Memo = {}
        return {label: self._value(label, drawn, params, memo) for label, drawn in params.items()}

    def _value(self, label: str, drawn: Any, params: Params, memo: tree.Memo) -> Any:
        if (options := self._options.get(label)) is not None:
            return options[drawn]
        if (call := self._calls.get(label)) is None:
            return int(drawn) if label in self._whole else drawn
        value = tree.evaluate(call, params, memo)
        return value.item() if isinstance(value, np.generic) else value

    def _plain(self, label: str, options: Sequence[tree.Node]) -> list[Any]:
        """Return the plain value or the name of each option of a choice.

        If an option has neither, the choice's label is added to `nested`.
        """
        values: list[Any] = []
        tags, names = option_tags(label, options, with_numbers=True), option_names(label, options)
        for option, tag, name in zip(map(tree.unshared, options), tags, names, strict=True):
            value = option.value if isinstance(option, tree.Literal) else tree
            value = value.item() if isinstance(value, np.generic) else value
            is_plain = isinstance(value, SCALARS)
            values.append(value if is_plain else name)
            if tag is None and not is_plain:
                self.nested.add(label)
        return values
