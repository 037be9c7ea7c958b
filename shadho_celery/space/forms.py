"""Makes a hyperopt space from short forms of domains.

The short form of a label's domain is a table in TOML, such as ``lr = {log = [1e-4, 1e-1]}``, or a placeholder in a
command, such as ``{lr:log:1e-4:1e-1}``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from contextlib import suppress
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, check_name, one_line, short
from shadho_celery.core.trial import Finite, Positive
from shadho_celery.errors import UsageError

#: maximum number of options of a choice
MOST_OPTIONS = 1000

_Range = Annotated[list[Finite], Meta(min_length=2, max_length=2)]

#: name of a label, without characters that cannot be in a placeholder
_LABEL = re.compile(r"[^\s{}:\x00-\x1f\x7f]{1,200}")
DOMAIN = "such as {uniform = [0, 1]}, {log = [1e-4, 1e-1]}, {int = [1, 9]} or {choice = ['adam', 'sgd']}"


class Domain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Short form of one label's domain: a distribution with its two ends, or a choice. Exactly one of them is given."""

    uniform: _Range | None = None
    log: _Range | None = None
    int: _Range | None = None
    logint: _Range | None = None
    #: True for a choice, whose options are checked by `Reader`
    choice: bool = False
    #: distance between two values: the values are multiples of it
    step: Positive | None = None


class Reader:
    """Makes hyperopt nodes from the short forms of a space."""

    def __init__(self) -> None:
        #: by label: its short form and its node. A label in two options of a choice has only one node
        self._known: dict[str, tuple[object, Any]] = {}

    def labels(self, table: Mapping[str, Any], where: str) -> dict[str, Any]:
        """Return the hyperopt node of each label in a table. Raises UsageError with the path of an invalid entry."""
        return {label: self._label(label, form, f"{where}.{label}") for label, form in table.items()}

    def _label(self, label: str, form: Any, where: str) -> Any:
        if not _LABEL.fullmatch(label):
            raise UsageError(f"{one_line(where)}: give the label a name without spaces, colons and braces")
        if not isinstance(form, Mapping):
            raise UsageError(f"{where}: {short(form, 60)} is no domain; write one, {DOMAIN}")
        if label in self._known:
            known, node = self._known[label]
            if known != form:
                raise UsageError(f"{where}: this label has another domain elsewhere; give it another name")
            return node
        self._known[label] = form, self._node(label, form, where)
        return self._known[label][1]

    def _node(self, label: str, form: Mapping[str, Any], where: str) -> Any:
        # Imported here, because placeholders of a command are read without hyperopt.
        from hyperopt import hp
        from hyperopt.pyll import scope

        domain = as_record({**form, "choice": True} if "choice" in form else form, Domain, where)
        given = [name for name in form if name != "step"]
        if len(given) != 1:
            raise UsageError(f"{where}: {' and '.join(given) or 'no domain'}; give one domain, {DOMAIN}")
        law, step = given[0], domain.step
        where = f"{where}.{law}"
        if law == "choice":
            if step is not None:
                raise UsageError(f"{where}: a choice has no step")
            return hp.choice(label, self._options(label, form["choice"], where))
        low, high = getattr(domain, law)
        if not low < high:
            raise UsageError(f"{where}: {low:g} is not below {high:g}; give [low, high]")
        is_whole, is_log = law in {"int", "logint"}, law in {"log", "logint"}
        if is_log and low <= 0:
            raise UsageError(f"{where}: {low:g} is not above 0, and has no logarithm; give the ends themselves")
        if is_whole and not all(map(float.is_integer, (low, high, step or 1.0))):
            raise UsageError(f"{where}: give whole numbers")
        ends = (math.log(low), math.log(high)) if is_log else (low, high)
        if step is not None and not all(math.isclose(end / step, round(end / step)) for end in (low, high)):
            raise UsageError(f"{where}: {low:g} and {high:g} are not multiples of the step {step:g}, as all values are")
        if is_whole or step is not None:
            node = (hp.qloguniform if is_log else hp.quniform)(label, *ends, step or 1)
            return scope.int(node) if is_whole else node
        return (hp.loguniform if is_log else hp.uniform)(label, *ends)

    def _options(self, label: str, options: object, where: str) -> list[Any]:
        """Return the options of a choice: plain values from a list, or options with labels from a table."""
        if not isinstance(options, (list, Mapping)) or not options or len(options) > MOST_OPTIONS:
            form = "a list of texts and numbers, or a table of named options with their labels"
            raise UsageError(f"{where}: give {form}, at most {MOST_OPTIONS:,}")
        if isinstance(options, Mapping):
            return [self._option(label, name, each, f"{where}.{name}") for name, each in options.items()]
        for place, each in enumerate(options):
            if not isinstance(each, str) and not (isinstance(each, (int, float)) and math.isfinite(each)):
                form = f"an option with labels of its own is a table {one_line(where)}.NAME"
                raise UsageError(f"{where}[{place}]: {short(each, 60)} is not a text or a finite number; {form}")
        return options

    def _option(self, label: str, name: str, table: object, where: str) -> Any:
        """Return a named option: a dict with the name and the option's labels, or the name if it has no labels."""
        if not isinstance(table, Mapping) or label in table:
            raise UsageError(f"{one_line(where)}: give a table of labels other than {label}, such as {{}} for none")
        return {label: name, **self.labels(table, where)} if table else name


def form_of_placeholder(label: str, parts: list[str], shown: str) -> dict[str, Any]:
    """Return the short form of the domain in a placeholder. `parts` are the texts between its colons."""
    law, *given = parts
    if law == "choice":
        return {law: [*map(_option_of, given)]}
    check_name("domain", law, [name for name in Domain.__struct_fields__ if name != "step"])
    numbers = [*map(_plain, given)]
    if not 2 <= len(numbers) <= 3 or any(isinstance(each, (str, bool)) for each in numbers):
        raise UsageError(f"{short(shown)}: write {{{label}:{law}:LOW:HIGH}}, and :STEP for multiples of it")
    return {law: numbers[:2], **({"step": numbers[2]} if numbers[2:] else {})}


def _plain(text: str) -> Any:
    """Return a finite number or a truth value if a text is one, else the text itself."""
    for kind in (int, float):
        with suppress(ValueError):
            if math.isfinite(value := kind(text)):
                return value
    return {"true": True, "false": False}.get(text, text)


def _option_of(text: str) -> Any:
    """Return an option as a number only if the number is written like the text: 0.1 is a number, 0.10 stays a text."""
    return value if str(value := _plain(text)) == text or isinstance(value, bool) else text
