"""Makes a hyperopt space from short forms of domains.

The short form of a label's domain is a table in TOML, such as ``lr = {log = [1e-4, 1e-1]}``, or a placeholder in a
command, such as ``{lr:log:1e-4:1e-1}``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, check_name
from shadho_celery.core.trial import Finite, Positive
from shadho_celery.errors import UsageError

#: maximum number of options of a choice
MOST_OPTIONS = 1000

DOMAIN = "such as {uniform = [0, 1]}, {log = [1e-4, 1e-1]}, {int = [1, 9]} or {choice = ['adam', 'sgd']}"

_TWO = Meta(min_length=2, max_length=2)
_SOME = Meta(min_length=1, max_length=MOST_OPTIONS)
_Range = Annotated[list[Finite], _TWO]
_Log = Annotated[Annotated[list[Positive], _TWO] | None, Meta(description="a logarithm needs two bounds above 0")]
#: plain options of a choice, or named options, each with its labels
_Options = Annotated[list[str | bool | int | Finite], _SOME] | Annotated[dict[str, dict[str, Any]], _SOME]


class Domain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Short form of one label's domain: a distribution with its two ends, or a choice. Exactly one of them is given."""

    uniform: _Range | None = None
    log: _Log = None
    int: _Range | None = None
    logint: _Log = None
    choice: _Options | None = None
    #: distance between two values: the values are multiples of it
    step: Positive | None = None


#: by label: its short form and its node. A label that occurs in two options of a choice has only one node
Known = dict[str, tuple[object, Any]]


def nodes_of(forms: Iterable[tuple[str, Any]], where: str, known: Known) -> dict[str, Any]:
    """Return the hyperopt node of each label, given with its short form.

    Raises UsageError, which names an invalid entry by its path, and for a label with another form before or in `known`.
    """
    found = {}
    for label, form in forms:
        if label not in known:
            known[label] = form, _node(label, form, f"{where}.{label}", known)
        elif known[label][0] != form:
            raise UsageError(f"{where}.{label}: this label has another domain elsewhere; give it another name")
        found[label] = known[label][1]
    return found


def _node(label: str, form: Any, where: str, known: Known) -> Any:
    # Imported here, because placeholders of a command are read without hyperopt.
    from hyperopt import hp
    from hyperopt.pyll import scope

    domain = as_record(form, Domain, where, f"give a domain, {DOMAIN}")
    given = [name for name in form if name != "step" or domain.choice is not None]
    if len(given) != 1:
        raise UsageError(f"{where}: {' and '.join(given) or 'no domain'}; give one domain, {DOMAIN}")
    [law], where = given, f"{where}.{given[0]}"
    if isinstance(options := form[law], Mapping):
        named = {name: nodes_of(labels.items(), f"{where}.{name}", known) for name, labels in options.items()}
        # The value of an option without labels is its name.
        options = [{label: name, **nodes} if nodes else name for name, nodes in named.items()]
    if law == "choice":
        return hp.choice(label, options)
    low, high = ends = getattr(domain, law)
    if low >= high:
        raise UsageError(f"{where}: {low:g} is not below {high:g}; give the lower end first")
    is_whole, is_log = law in {"int", "logint"}, law in {"log", "logint"}
    step = domain.step or (1.0 if is_whole else None)
    if step and not all(
        math.isclose(end / step, round(end / step)) and (step % 1 == 0 or not is_whole) for end in ends
    ):
        kind = "a whole number" if is_whole else "as all values are"
        raise UsageError(f"{where}: {low:g} and {high:g} must be multiples of the step {step:g}, {kind}")
    bounds = map(math.log, ends) if is_log else ends
    if step is None:
        return (hp.loguniform if is_log else hp.uniform)(label, *bounds)
    node = (hp.qloguniform if is_log else hp.quniform)(label, *bounds, step)
    return scope.int(node) if is_whole else node


def form_of(text: str) -> dict[str, Any]:
    """Return the short form of a domain in a placeholder, such as ``log:1e-4:1e-1``. Raises UsageError."""
    law, *given = text.split(":")
    check_name("domain", law, [name for name in Domain.__struct_fields__ if name != "step"])
    if law == "choice":
        return {law: [*map(_option_of, given)]}
    numbers = [*map(_plain, given)]
    return {law: numbers[:2], "step": numbers[2]} if len(numbers) == 3 else {law: numbers}


def _plain(text: str) -> Any:
    """Return a finite number or a truth value if a text is one, else the text itself."""
    for kind in (int, float):
        with suppress(ArithmeticError, ValueError):
            if math.isfinite(value := kind(text)):
                return value
    return {"true": True, "false": False}.get(text, text)


def _option_of(text: str) -> Any:
    """Return an option as a number only if the number is written like the text: 0.1 is a number, 0.10 stays a text."""
    return value if str(value := _plain(text)) == text or isinstance(value, bool) else text
