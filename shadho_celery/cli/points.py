"""Files of known points, which the commands `run` and `enqueue` read."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path

from shadho_celery.core.checks import is_shallow, one_line, short
from shadho_celery.core.files import MAX_NESTED, read_text
from shadho_celery.errors import UsageError

#: remedy that describes the format of a file of known points
FORM = 'write one JSON object a line, such as {"rate": 0.1}, or one list of them'


def points(path: Path) -> list[object]:
    """Return the known points in a file. The error for an invalid file names it, and the line that is not JSON."""
    return points_in(read_text(path, f"the points in {path}", FORM), str(path))


def points_in(text: str, where: str) -> list[object]:
    """Return the known points in a text, which errors call `where`. Raises UsageError if it is not JSON."""
    if text.lstrip().startswith("["):
        found = _parsed(text, where)
        return found if isinstance(found, list) else [found]
    # splitlines is not used, because a JSON text may contain U+2028 and U+0085.
    lines = enumerate(text.split("\n"), 1)
    return [_parsed(line, f"line {number} of {where}") for number, line in lines if line.strip()]


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    """Return a JSON object as a dict. Raises ValueError if a name occurs twice, because either value may be meant."""
    found = dict(pairs)
    if len(found) < len(pairs):
        [(name, _)] = Counter(name for name, _ in pairs).most_common(1)
        raise ValueError(f"{short(name)} occurs twice in one object")
    return found


def _parsed(text: str, where: str) -> object:
    try:
        parsed: object = json.loads(text, object_pairs_hook=_unique)
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is not JSON ({one_line(error)}); {FORM}") from None
    if not is_shallow(parsed, MAX_NESTED):
        raise UsageError(f"{where} has more than {MAX_NESTED} levels; {FORM}")
    return parsed
