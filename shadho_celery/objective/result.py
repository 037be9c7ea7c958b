"""Reads the return value of an objective: its loss or losses, its constraints, and its metrics."""

from __future__ import annotations

import json
import math
import numbers
from collections.abc import Collection, Mapping
from decimal import Decimal
from itertools import accumulate, islice
from typing import Any

from msgspec.structs import replace

from shadho_celery.core.checks import short
from shadho_celery.core.trial import Outcome, TrialState, turned

#: hyperopt's statuses of a result; a loss counts only with the status "ok", or without a status
STATUSES = ("new", "running", "suspended", "fail", "ok")

#: maximum number of bytes of JSON of all metrics of a trial together
MAX_METRICS = 1_000_000

#: maximum number of metrics that are read
MAX_KEYS = 20_000

#: maximum depth of a nested metric
MAX_DEPTH = 100

#: maximum number of characters of the names and reasons in a warning about dropped metrics
MAX_WARNING = 500

#: maximum number of constraints or losses of a trial, and of characters of their names
MOST_NUMBERS, MAX_NAME = 100, 60

#: description of what an objective returns in a study of one loss without a name
NO_OBJECTIVES = "its loss, a number, or a dict with 'loss'"

#: example of the setting that names several losses
_NAMED = 'STUDY["objectives"] = {"error": "minimize", "accuracy": "maximize"}'

_encode = json.JSONEncoder(ensure_ascii=False, allow_nan=False).encode


class Unreadable(ValueError):
    """The return value of the objective has no loss."""


class _Unfit(Exception):
    """JSON cannot represent a metric. The message gives the reason."""


def read(returned: Any, objectives: Mapping[str, str] | None = None) -> Outcome:
    """Return the COMPLETE outcome for an objective's return value: a number, or a mapping with the key `loss`.

    In a study with `objectives`, the return value is a mapping whose key `losses` has a number for each objective.
    With only one objective, it may be a plain number. Metrics that JSON cannot represent are dropped with a warning. An
    Outcome is returned unchanged. Raises Unreadable with a message for the user, also if the mapping has a `status`
    other than hyperopt's "ok".
    """
    if isinstance(returned, Outcome):
        return returned
    try:
        if isinstance(returned, Mapping):
            return _read_mapping(returned, objectives)
        if returned is None:
            raise Unreadable(f"the objective's return value is None; return {_form(objectives) or NO_OBJECTIVES}")
        if isinstance(returned, (tuple, list)):
            form = _form(objectives) or f"one number, or for several losses {{'losses': {{...}}}} and {_NAMED}"
            raise Unreadable(f"the objective's return value is a {type(returned).__name__}; return {form}")
        found = number(returned, "the objective's return value")
        if not objectives:
            return Outcome(state=TrialState.COMPLETE, loss=found)
        if len(objectives) > 1:
            raise Unreadable(f"the objective returned one number; return {_form(objectives)}")
        return Outcome(state=TrialState.COMPLETE, **_minimised(dict.fromkeys(objectives, found), objectives))
    except Unreadable:
        raise
    except Exception as error:
        text = f"what the objective returned cannot be read: {type(error).__name__}: {short(error)}"
        raise Unreadable(text) from error


def number(value: Any, what: str, *, finite: bool = True) -> float:
    """Return `value` as a float. Raises Unreadable if it is not a number, or if `finite` and it is inf or NaN.

    The error calls the value `what`.
    """
    # numpy itself would convert its masked constant to 0.0.
    if getattr(value, "ndim", None) == 0 and getattr(value, "mask", False):
        raise Unreadable(f"{what} is masked")
    value = scalar(value)
    if not isinstance(value, (float, numbers.Real, Decimal)):
        raise Unreadable(f"{what} is not a number but {type(value).__name__}: {short(value)}")
    try:
        found = float(value)
    except OverflowError:
        raise Unreadable(f"{what} is too large for a float: {short(value)}") from None
    except Exception as error:
        raise Unreadable(f"{what} cannot be converted to a float: {short(error)}") from None
    if finite and not math.isfinite(found):
        raise Unreadable(f"{what} is {found}")
    return found


def scalar(value: Any) -> Any:
    """Return the number in a numpy scalar, or in an array or tensor without dimensions; any other value unchanged."""
    return value.item() if getattr(value, "ndim", None) == 0 and hasattr(value, "item") else value


def _read_mapping(returned: Mapping[Any, Any], objectives: Mapping[str, str] | None) -> Outcome:
    _check_status(scalar(returned.get("status")))
    facts: dict[str, Any] = _losses(returned, objectives) if objectives else {"loss": _loss(returned)}
    if "constraints" in returned:
        facts["constraints"] = _numbers(returned["constraints"], "constraints")
    return replace(read_metrics(returned, facts), **facts)


def read_metrics(returned: Mapping[Any, Any], without: Collection[str] = ()) -> Outcome:
    """Return an outcome with the items of a mapping as its metrics, and a warning about those that were dropped."""
    # The mapping's own length is not used: it may be wrong, or the mapping may never end.
    keys = list(islice(returned, MAX_KEYS + 1))
    metrics = {key: returned[key] for key in keys[:MAX_KEYS] if not (isinstance(key, str) and key in without)}
    kept, dropped = _fitting(metrics)
    if len(keys) > MAX_KEYS:
        dropped[f"all after the first {MAX_KEYS}"] = "too many"
    warning = _warning(dropped) if dropped else None
    return Outcome(state=TrialState.COMPLETE, metrics=kept, warning=warning)


def _loss(returned: Mapping[Any, Any]) -> float:
    if "losses" in returned:
        raise Unreadable(
            f"the objective returned 'losses', but the study has no objectives; name them, such as {_NAMED}, or "
            "return a 'loss'"
        )
    if "loss" not in returned:
        has = ", ".join(map(short, islice(returned, 20)))
        raise Unreadable(f"the objective returned a dict without 'loss' (it has {has or 'nothing'})")
    return number(returned["loss"], "'loss'")


def _losses(returned: Mapping[Any, Any], objectives: Mapping[str, str]) -> dict[str, Any]:
    """Return the values of the outcome's fields `loss` and `losses`. The losses have the order of the objectives.

    Raises Unreadable unless there is a number for each objective.
    """
    if len(objectives) == 1 and "losses" not in returned:
        return _minimised(dict.fromkeys(objectives, _loss(returned)), objectives)
    if "loss" in returned or "losses" not in returned:
        has = "with 'loss'" if "loss" in returned else "without 'losses'"
        raise Unreadable(f"the objective returned a dict {has}; return {_form(objectives)}")
    found = _numbers(returned["losses"], "losses")
    lacking = [name for name in objectives if name not in found]
    if lacking or (more := [name for name in found if name not in objectives]):
        wrong = f"no {', '.join(lacking)}" if lacking else f"{', '.join(map(short, more))}"
        raise Unreadable(
            f"the 'losses' that the objective returned have {wrong}; the study's objectives are {', '.join(objectives)}"
        )
    return _minimised({name: found[name] for name in objectives}, objectives)


def _minimised(losses: Mapping[str, float], objectives: Mapping[str, str]) -> dict[str, Any]:
    minimised = turned(losses, objectives)
    return {"loss": next(iter(minimised.values())), "losses": minimised}


def _numbers(returned: Any, what: str) -> dict[str, float]:
    """Check that `returned` maps names to finite numbers, and return them as floats.

    Raises Unreadable, which names the first value that is not a finite number.
    """
    if not isinstance(returned, Mapping):
        raise Unreadable(
            f"{what!r} is not a dict but {type(returned).__name__}: {short(returned)}; give numbers by name"
        )
    keys = list(islice(returned, MOST_NUMBERS + 1))
    if len(keys) > MOST_NUMBERS:
        raise Unreadable(f"{what!r} has more than {MOST_NUMBERS} numbers; give fewer")
    if odd := [key for key in keys if not (isinstance(key, str) and 0 < len(key) <= MAX_NAME and key.isprintable())]:
        raise Unreadable(f"{what!r} has the name {short(odd[0], 60)}; a name is a text of up to {MAX_NAME} characters")
    return {str.__str__(key): number(returned[key], f"{key!r} of {what!r}") for key in keys}


def _form(objectives: Mapping[str, str] | None) -> str:
    """Return a pattern of the dict that the objective should return; "" if its loss has no name."""
    return f"{{'losses': {{{', '.join(f'{name!r}: ...' for name in objectives)}}}}}" if objectives else ""


def _check_status(status: Any) -> None:
    """Raise Unreadable unless the status is "ok" or missing (None)."""
    text = str.__str__(status) if isinstance(status, str) else None
    if status is None or text == "ok":
        return
    if text in STATUSES:
        raise Unreadable(f"the objective returned status {text!r}")
    known = ", ".join(STATUSES)
    raise Unreadable(f"the objective returned the unknown status {short(status, 60)}; known are {known}")


def _fitting(items: Mapping[Any, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the metrics that are kept, and for each dropped metric the reason, by its name."""
    kept: dict[str, Any] = {}
    sizes: dict[str, int] = {}
    dropped: dict[str, str] = {}
    # Reading stops once the metrics together are far too large.
    in_all = 4 * MAX_METRICS
    for key, value in items.items():
        left = [most := min(MAX_METRICS, in_all)]
        try:
            name = _name(key)
            if name in kept or (not isinstance(key, str) and name in items):
                raise _Unfit("the key occurs twice")
            plain = _plain(value, left)
            sizes[name] = len(_encode({name: plain}).encode(errors="replace"))
            kept[name] = plain
        except _Unfit as why:
            dropped[short(key)] = str(why)
        except Exception as error:
            dropped[short(key)] = f"{type(error).__name__}: {short(error)}"
        in_all -= most - max(left[0], 0)
    total = sum(sizes.values())
    for name in sorted(kept, key=sizes.__getitem__, reverse=True):
        if total <= MAX_METRICS:
            break
        dropped[short(name)] = f"{sizes[name]} bytes, and the limit for all metrics is {MAX_METRICS}"
        total -= sizes[name]
        del kept[name]
    return kept, dropped


def _warning(dropped: Mapping[str, str]) -> str:
    """Return one line that names the dropped metrics."""
    parts = [f"{key} ({why})" for key, why in dropped.items()]
    sizes = accumulate(len(part) + len("; ") for part in parts)
    fitting = sum(size <= MAX_WARNING for size in sizes)
    rest = [f"and {len(parts) - fitting} more"] if fitting < len(parts) else []
    return "metrics dropped: " + "; ".join(parts[:fitting] + rest)


def _plain(value: Any, left: list[int], depth: int = 0) -> Any:
    """Convert `value` to types that JSON has: every number to an int or a float, arrays to lists.

    `left[0]` is the number of bytes that may still be read. The size of the value is subtracted from it. Raises _Unfit.
    """
    value, size = scalar(value), 1
    if is_array := bool(hasattr(value, "tolist") and getattr(value, "ndim", None)):
        size = 2 * math.prod(value.shape)
    elif isinstance(value, str):
        value = str.__str__(value)
        size += len(value)
    elif isinstance(value, (int, numbers.Integral)):
        value = value if isinstance(value, bool) else int(value)
        size += value.bit_length() // 4
    elif isinstance(value, (float, numbers.Real, Decimal)) and not math.isfinite(value := float(value)):
        raise _Unfit(f"it is {value}")
    left[0] -= size
    if left[0] < 0:
        raise _Unfit(f"it is larger than the {MAX_METRICS} bytes that metrics may take")
    if value is None or isinstance(value, (int, float, str)):
        return value
    if depth > MAX_DEPTH:
        raise _Unfit("it is nested too deeply, or is circular")
    value = value.tolist() if is_array else value
    if isinstance(value, (list, tuple)):
        return [_plain(each, left, depth + 1) for each in value]
    if not isinstance(value, Mapping):
        raise _Unfit(f"{type(value).__name__} cannot be written as JSON")
    pairs: dict[str, Any] = {}
    for key in value:
        name = _name(key)
        if name in pairs:
            raise _Unfit(f"the key {short(name)} occurs twice")
        left[0] -= len(name)
        pairs[name] = _plain(value[key], left, depth + 1)
    return pairs


def _name(key: Any) -> str:
    """Return the key as a text, as JSON needs it. Raises _Unfit if it is neither a text nor a number."""
    key = scalar(key)
    if isinstance(key, str):
        return str.__str__(key)
    if key is None or isinstance(key, numbers.Real):
        return str(key)
    raise _Unfit(f"a key must be a text or a number, not {type(key).__name__}")
