"""Known points of a space: a user gives values of labels, and missing labels are proposed by a sampler or drawn."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.trial import Params
from shadho_celery.errors import SpaceError
from shadho_celery.space.describe import option_names
from shadho_celery.space.domains import Continuous, Discrete, Domain
from shadho_celery.space.space import Space
from shadho_celery.space.split import Subspace
from shadho_celery.space.tree import Literal, Node, unshared

#: maximum number of draws to find options with which all given labels are active
TRIES = 20
#: maximum number of draws of missing values to find a point that the space's `where` allows
ALLOWED = 1000
#: larger ints may be too large for a float
_LARGEST = 2**1023


def complete(
    space: Space,
    subspaces: Sequence[Subspace],
    point: object,
    generator: np.random.Generator,
    *,
    off_grid: bool = False,
) -> tuple[str, Params]:
    """Return the subspace and the params of a point, which is a dict of labels and values. Missing labels are drawn.

    The value of a choice is the index or the name of an option. Missing choices are drawn such that all given labels
    are active. Missing labels are drawn again, up to ALLOWED times, until the space's `where` allows the point. A value
    that differs from a grid value only by rounding becomes the grid value. If `off_grid`, other values between grid
    values are accepted. Raises SpaceError, with the label, for a point outside the space.
    """
    given = given_values(space, point, off_grid=off_grid)
    for _ in range(TRIES):
        pins = _with_choices(space, given, generator)
        params: Params = space.draw(generator, 1, pins)[0]
        if not (unused := [label for label in given if label not in params]):
            break
    else:
        raise SpaceError(f"{unused[0]!r} is not active together with the other labels; leave it out")
    if len(params) > len(given) and not space.allows(params):
        others = (each for each in space.draw(generator, ALLOWED, pins) if {*given} <= {*each})
        params = next(space.allowed(others), params)
    space.check(params)
    for subspace in subspaces:
        if subspace.contains(params):
            return subspace.name, params
    ruled_out = ", or one for which where allows nothing" if space.left_out else ""
    raise SpaceError(f"{short(given, 60)} is in no subspace: it selects an option of probability 0{ruled_out}")


def given_values(space: Space, point: object, *, off_grid: bool = False) -> dict[str, Any]:
    """Return the given labels and values of a point in the form of draws. Raises SpaceError as `complete` does."""
    if not isinstance(point, Mapping):
        raise SpaceError(f"it is not a dict of labels and values but {short(point, 60)}")
    found = {str(label): _value(space, label, value) for label, value in point.items()}
    return {label: _on_grid(label, space.domains[label], value, off_grid) for label, value in found.items()}


def fill(
    space: Space,
    point: object,
    completed: Params,
    proposals: Sequence[Params],
    generator: np.random.Generator,
    *,
    is_new: Callable[[Params], bool],
) -> Params:
    """Return the params of a point, with missing labels from the proposal that is nearest to the given values.

    Proposals that lead to params which are `is_new` are preferred. `completed` are the params that `complete` has
    returned for the point. A label that neither the point nor the proposal has is drawn. If no proposal fits,
    `completed` is returned.
    """
    given = given_values(space, point)
    # Choices of `completed` that make a given label active must be kept.
    needed = {choice: completed[choice] for label in given for choice in _above(space, label, completed)}
    fixed = {**needed, **given}
    fitting: list[Params] = []
    for proposal in sorted(proposals, key=lambda each: _distance(space, fixed, each)):
        params: Params = space.draw(generator, 1, {**proposal, **fixed})[0]
        if all(label in params for label in given) and space.allows(params):
            if is_new(params):
                return params
            fitting.append(params)
    return next(iter(fitting), completed)


def _above(space: Space, label: str, params: Params) -> list[str]:
    """Return the choices whose options make a label active in these params."""
    ways = space.conditions[label]
    way = next((way for way in ways if all(params.get(choice) == place for choice, place in way)), ())
    return [choice for choice, _ in way]


def _distance(space: Space, fixed: Mapping[str, Any], params: Params) -> float:
    """Return the distance of params from the given values. A different option, or an inactive label, counts as 1."""
    found = 0.0
    for label, value in fixed.items():
        domain = space.domains[label]
        if label not in params or not domain.is_numeric:
            found += params.get(label) != value
        else:
            ends = domain.to_unit([value, params[label]]).tolist()
            found += abs(ends[0] - ends[1])
    return found


def _value(space: Space, label: object, value: Any) -> Any:
    """Return a value in the form of a draw. Raises SpaceError unless label and value belong to the space."""
    if not isinstance(label, str) or label not in space.domains:
        known = one_line(", ".join(space.domains), 300) or "none"
        raise SpaceError(f"there is no label {short(label, 60)}; known are {known}")
    domain = space.domains[label]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, str) and label in space.switches:
        options = space.switches[label].options
        if (place := _place_of_text(options, value)) is not None:
            return place
        names = option_names(label, options)
        if value not in names:
            raise SpaceError(f"{label!r} has no option {value!r}; give an index, or one of {', '.join(names)}")
        return names.index(value)
    if isinstance(domain, Discrete) and isinstance(value, float) and value.is_integer():
        value = int(value)
    if isinstance(domain, Continuous) and type(value) is int:
        value = float(value) if abs(value) < _LARGEST else value
    if not domain.contains(value):
        ends = ""
        if isinstance(domain, Continuous):
            least, most = domain.from_unit([0.0, 1.0]).tolist()
            ends = f", which draws from {least:g} to {most:g}"
        raise SpaceError(f"{label!r}: {short(value, 60)} is outside {domain.describe()}{ends}")
    return value


def _on_grid(label: str, domain: Domain, value: Any, off_grid: bool) -> Any:
    """Return the value rounded to the grid. Raises SpaceError for a value between grid points, unless `off_grid`."""
    if not isinstance(domain, Continuous) or (off_grid and domain.on_grid(value) is None):
        return value
    if (found := domain.on_grid(value)) is not None:
        return found
    beside = " and ".join(f"{each:.15g}" for each in domain.beside(value))
    raise SpaceError(f"{label!r}: {short(value, 60)} is not a value of {domain.describe()}; the nearest are {beside}")


def _place_of_text(options: Sequence[Node], text: str) -> int | None:
    """Return the index of the option that is this text, or None."""
    for place, option in enumerate(map(unshared, options)):
        if isinstance(option, Literal) and isinstance(option.value, str) and option.value == text:
            return place
    return None


def _with_choices(space: Space, given: Mapping[str, Any], generator: np.random.Generator) -> dict[str, Any]:
    """Return the given values, and options that make each given label active."""
    pins = dict(given)
    for label in given:
        ways = [
            way
            for way in space.conditions[label]
            if all(pins.get(choice, place) == place for choice, place in way) and _is_possible(space, way)
        ]
        if not ways:
            raise SpaceError(f"{label!r} is not active together with the other labels; leave it out")
        pins.update(ways[int(generator.integers(len(ways)))])
    return pins


def _is_possible(space: Space, way: Sequence[tuple[str, int]]) -> bool:
    domains = ((space.domains[choice], place) for choice, place in way)
    return all(not isinstance(domain, Discrete) or domain.probability(place) > 0 for domain, place in domains)
