"""Plain values of a trial by label, for the arguments of a command."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from shadho_celery.core.trial import Params
from shadho_celery.space import tree
from shadho_celery.space.describe import option_names, option_tags, outermost_calls
from shadho_celery.space.space import Space

#: types of the values that an argument can hold
SCALARS = (bool, int, float, str, type(None), np.generic)


class FlatValues:
    """Called with a trial's params, returns the value of each active label: a number, a text, True, False or None.

    The value of a choice is the chosen option. If this option has labels, or is a dict or a tuple, it is the option's
    name. The value of a label that is used in exactly one expression, such as ``scope.int(...)``, is the value of this
    expression.
    """

    def __init__(self, space: Space) -> None:
        #: labels of choices with an option that is not a plain value and has no name
        self.nested: set[str] = set()
        #: by label of a choice: the plain value or the name of each option
        self._options: dict[str, list[Any]] = {}
        for label, switch in space.switches.items():
            values = [getattr(tree.unshared(option), "value", option) for option in switch.options]
            names, tags = option_names(label, switch.options), option_tags(label, switch.options, with_numbers=True)
            kinds = [isinstance(value, SCALARS) for value in values]
            self._options[label] = [v if plain else name for v, plain, name in zip(values, kinds, names, strict=True)]
            if not all(plain or tag is not None for plain, tag in zip(kinds, tags, strict=True)):
                self.nested.add(label)
        calls = {label: {*found} for label, found in outermost_calls(space.root).items() if label not in self._options}
        self._calls = {label: found.pop() for label, found in calls.items() if len(found) == 1}
        self._whole = space.whole

    def __call__(self, params: Params) -> Mapping[str, Any]:
        memo: tree.Memo = {}
        found: dict[str, Any] = {}
        for label, drawn in params.items():
            if label in self._options:
                value = self._options[label][drawn]
            elif label in self._calls:
                value = tree.evaluate(self._calls[label], params, memo)
            else:
                value = int(drawn) if label in self._whole else drawn
            found[label] = value.item() if isinstance(value, np.generic) else value
        return found
