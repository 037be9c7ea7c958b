"""The laws a hyperparameter may follow, hyperopt's own, and `make_domain`, which builds one from what a space says.

`Domain` is the role; values are hyperopt's raw draws: floats, whole numbers, and option indexes for choices.
"""

from __future__ import annotations

import math
import numbers
from collections.abc import Iterable, Mapping
from dataclasses import fields

import numpy as np

from shadho_celery.errors import SpaceError
from shadho_celery.space.continuous import (
    LogNormal,
    LogUniform,
    Normal,
    QLogNormal,
    QLogUniform,
    QNormal,
    QUniform,
    Uniform,
)
from shadho_celery.space.discrete import Categorical, Discrete, RandInt
from shadho_celery.space.domain import Domain, validate

__all__ = [
    "CONTINUOUS", "Categorical", "Discrete", "Domain", "LogNormal", "LogUniform", "Normal", "QLogNormal", "QLogUniform",
    "QNormal", "QUniform", "RandInt", "Uniform", "make_domain", "validate",
]  # fmt: skip

#: hyperopt's name of a law with real bounds -> its domain, whose fields are the law's parameters in order
CONTINUOUS: Mapping[str, type[Domain]] = {
    kind.law: kind for kind in (Uniform, QUniform, LogUniform, QLogUniform, Normal, QNormal, LogNormal, QLogNormal)
}


def make_domain(label: str, law: str, arguments: Mapping[str, object]) -> Domain:
    """Build and validate the domain of one hyperparameter.

    `law` is hyperopt's name, `arguments` its parameters by hyperopt's names, already numbers (for "categorical": "p", a
    sequence). Raises SpaceError, naming the label, the cause and the remedy.
    """
    domain: Domain
    if law in CONTINUOUS:
        domain = CONTINUOUS[law](*(_real(label, law, field.name, arguments) for field in fields(CONTINUOUS[law])))
    elif law == "randint":
        low = _whole(label, "low", arguments)
        has_high = arguments.get("high") is not None
        domain = RandInt(low, _whole(label, "high", arguments)) if has_high else RandInt(0, low)
    elif law == "categorical":
        domain = _categorical(label, arguments.get("p"))
    else:
        raise SpaceError(f"Hyperparameter {label!r}: no known law {law!r}; use one of hyperopt's hp functions.")
    validate(label, domain)
    return domain


def _real(label: str, law: str, name: str, arguments: Mapping[str, object]) -> float:
    """The parameter as a float."""
    if name not in arguments:
        raise SpaceError(f"Hyperparameter {label!r}: {law} lacks {name}; give a number.")
    value = arguments[name]
    if isinstance(value, np.ndarray) and value.ndim == 0:
        value = value.item()
    # a bool is a number to Python, but as a bound it is a slip
    if isinstance(value, bool) or not isinstance(value, numbers.Real):
        raise SpaceError(f"Hyperparameter {label!r}: {name} of {law} is {_short(value)}; give a number.")
    try:
        return float(value)
    except OverflowError:
        raise SpaceError(f"Hyperparameter {label!r}: {name} of {law} is too large for a float; give less.") from None


def _whole(label: str, name: str, arguments: Mapping[str, object]) -> int:
    """The parameter as an int; 5.0 passes for 5."""
    value = arguments.get(name)
    if not isinstance(value, bool) and isinstance(value, numbers.Integral):
        return int(value)
    real = _real(label, "randint", name, arguments)
    if not math.isfinite(real) or not real.is_integer():
        raise SpaceError(f"Hyperparameter {label!r}: {name} of randint is {_short(value)}; give a whole number.")
    return int(real)


def _categorical(label: str, weights: object) -> Categorical:
    """The law of a pchoice, its probabilities renormalised where rounding left their sum a little off 1."""
    if not isinstance(weights, Iterable) or isinstance(weights, (str, bytes)):
        raise SpaceError(f"Hyperparameter {label!r}: its probabilities are {_short(weights)}; give one per option.")
    masses = tuple(_real(label, "pchoice", "probability", {"probability": weight}) for weight in weights)
    validate(label, Categorical(masses))
    total = math.fsum(masses)
    return Categorical(tuple(mass / total for mass in masses))


def _short(value: object) -> str:
    """A value for an error's one line."""
    text = repr(value).replace("\n", " ")
    return text if len(text) <= 60 else f"{text[:57]}..."
