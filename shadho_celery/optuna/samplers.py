"""Optuna's samplers by the names of their classes: samplers of this package, or of Optuna itself."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shadho_celery.errors import UsageError
from shadho_celery.program.interrupts import warn

#: settings for one of Optuna's classes; and our names of its arguments, in Optuna's order. An argument without effect
#: has the name ""
Known = tuple[Mapping[str, Any], Mapping[str, str]]

_SEED = {"seed": "seed"}
_SAMPLERS: Mapping[str, Known] = {
    "TPESampler": ({"sampler": "tpe"}, _SEED),
    "GPSampler": ({"sampler": "gp"}, _SEED),
    "CmaEsSampler": ({"sampler": "cma"}, {"x0": "", "sigma0": "", **_SEED}),
    "QMCSampler": ({"sampler": "qmc"}, _SEED),
    "RandomSampler": ({"sampler": "random"}, _SEED),
    "BruteForceSampler": ({"sampler": "grid"}, _SEED),
    "NSGAIISampler": ({"sampler": "optuna:NSGAIISampler"}, _SEED),
    "NSGAIIISampler": ({"sampler": "optuna:NSGAIIISampler"}, _SEED),
}
#: class or argument that is refused -> what to do instead
_INSTEAD = {
    "GridSampler": "BruteForceSampler tries every point of the space that the objective asks for",
    "PartialFixedSampler": "enqueue_trial fixes labels of single trials",
    "BaseSampler": "a sampler of your own is a class with ask and tell, see the README of samplers",
    "constraints_func": 'the objective returns its constraints, as {"loss": 1.0, "constraints": {"memory": 0.5}}',
    "wrapped_pruner": "give None, or the other pruner alone",
}


def __getattr__(name: str) -> Any:
    return maker(name, _SAMPLERS)


def maker(name: str, known: Mapping[str, Known]) -> Callable[..., dict[str, Any]]:
    """Return a function that makes the settings for one of Optuna's classes. Raises UsageError or AttributeError."""
    _refuse(name)
    if name not in known:
        raise AttributeError(f"there is no {name} here; choose one of {', '.join(known)}")
    settings, names = known[name]

    def make(*args: Any, **named: Any) -> dict[str, Any]:
        if len(args) > len(names):
            raise UsageError(f"{name}: give arguments after the first {len(names)} by name")
        given = {**dict(zip(names, args, strict=False)), **named}
        given = {each: value for each, value in given.items() if value is not None and value != "auto"}
        _refuse(*given)
        if lost := [each for each in given if not names.get(each)]:
            have = "has" if len(lost) == 1 else "have"
            warn(f"{name}: {', '.join(lost)} {have} no effect, because here it is {next(iter(settings.values()))}")
        return {**settings, **{names[each]: value for each, value in given.items() if each not in lost}}

    return make


def _refuse(*names: str) -> None:
    """Raise UsageError if one of these names of Optuna has no counterpart here."""
    for name in names:
        if name in _INSTEAD:
            raise UsageError(f"there is no {name} here; {_INSTEAD[name]}")
