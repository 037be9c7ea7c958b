"""Texts of a compiled space, the same in every process: to compare it with a stored one, and to name options."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from collections.abc import Sequence as SequenceOf
from enum import Enum
from itertools import islice

import numpy as np

from shadho_celery.space.tree import (
    Call,
    Dict,
    Literal,
    Node,
    Param,
    Sequence,
    Shared,
    Switch,
    Value,
    postorder,
    unshared,
)

#: a longer text is replaced by its beginning and its hash
MAX_TEXT = 200


def structure(root: Node) -> dict[Node, str]:
    """A text for every node under `root`: what is computed from which labels."""
    texts: dict[Node, str] = {}
    for node in postorder(root, lambda parent: parent.children):
        texts[node] = _shortened(_node_text(node, texts))
    return texts


def expressions(root: Node, texts: Mapping[Node, str]) -> dict[str, list[str]]:
    """Label -> the outermost calls that compute from this label alone; hyperopt's own float() and int() left out."""
    labels: dict[Node, frozenset[str]] = {}
    order = list(postorder(root, lambda parent: parent.children))
    for node in order:
        own = [node.label] if isinstance(node, Param) else []
        # two are as good as many: a set of all labels at every node would take long in a large space
        labels[node] = frozenset(
            islice(sorted({*own, *(label for child in node.children for label in labels[child])}), 2)
        )
    found: dict[str, list[str]] = {}
    inside: set[Node] = set()
    for node in reversed(order):
        is_call = isinstance(node, Call) and len(labels[node]) == 1
        if is_call and node not in inside:
            (label,) = labels[node]
            if texts[node] not in (f"float(<{label}>)", f"int(<{label}>)", f"int(float(<{label}>))"):
                found.setdefault(label, []).append(texts[node])
        if is_call or node in inside:
            inside.update(node.children)
    return {label: sorted(set(calls)) for label, calls in found.items()}


def _node_text(node: Node, texts: dict[Node, str]) -> str:
    parts = [texts[child] for child in node.children]
    match node:
        case Param(label=label):
            return f"<{label}>"
        case Literal(value=value):
            return literal_text(value)
        case Sequence():
            return f"({', '.join(parts)})"
        case Dict(items=items):
            return f"{{{', '.join(f'{key!r}: {text}' for (key, _), text in zip(items, parts, strict=True))}}}"
        case Switch():
            return f"choose({', '.join(parts)})"
        case Call(name=name, args=args, kwargs=kwargs):
            named = [f"{key}={text}" for (key, _), text in zip(kwargs, parts[len(args) :], strict=True)]
            return f"{name}({', '.join(parts[: len(args)] + named)})"
        case _:
            return parts[0]


def _shortened(text: str) -> str:
    if len(text) <= MAX_TEXT:
        return text
    return f"{text[: MAX_TEXT - 20]}... {digest(text)}"


def digest(text: str) -> str:
    """Twelve hexadecimal digits that stand for a text."""
    return hashlib.sha256(text.encode("utf-8", "backslashreplace")).hexdigest()[:12]


#: bits of an int above which Python may refuse to write it in decimals
LONG_INT = 14_000


def literal_text(value: Value) -> str:
    """A constant's text without addresses; where a type's repr may hold one, the type's name stands for it."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, Enum):
        return f"{type(value).__qualname__}.{value.name}"
    if isinstance(value, int) and value.bit_length() > LONG_INT:
        return hex(value)
    if value is None or isinstance(value, (bool, int, float, complex, str, bytes)):
        return repr(value)
    if isinstance(value, np.ndarray):
        content = literal_text(value.tolist())
        return f"array({value.dtype}, {value.shape}, {digest(content)})"
    if isinstance(value, (tuple, list)):
        return f"({', '.join(map(literal_text, value))})"
    if isinstance(value, (set, frozenset)):
        return f"{{{', '.join(sorted(map(literal_text, value)))}}}"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{literal_text(key)}: {literal_text(item)}' for key, item in value.items())}}}"
    # A generator has a name and no module.
    named = value if hasattr(value, "__qualname__") and hasattr(value, "__module__") else type(value)
    return f"{named.__module__}.{named.__qualname__}"


def is_constant(node: Node) -> bool:
    """Whether the node is made of literals, tuples and dicts alone."""
    return all(isinstance(part, (Literal, Sequence, Dict, Shared)) for part in postorder(node, lambda n: n.children))


def literal_of(node: Node, place: int) -> Value:
    """What a report shows for an option: the constant that it is, else its name in a report, else its index."""
    return node.evaluate({}, {}) if is_constant(node) else place


def option_names(label: str, options: SequenceOf[Node]) -> tuple[str, ...]:
    """A name for each option: its literal tag where it has one of its own, else its index.

    The tag is the option itself where it is a string, number, bool or None; a tuple's first item where that is a
    string; in a dict the string under the choice's own label, else under the first key that tells all the dicts apart,
    else its first.
    """
    plain = [unshared(option) for option in options]
    key = _telling_key(label, [option for option in plain if isinstance(option, Dict)])
    tags = [_storable(_tag(option, key)) for option in plain]
    counts: dict[str | None, int] = {}
    for tag in tags:
        counts[tag] = counts.get(tag, 0) + 1
    names = tuple(tag if tag is not None and counts[tag] == 1 else str(place) for place, tag in enumerate(tags))
    # a tag may look like another option's index
    return names if len(set(names)) == len(names) else tuple(map(str, range(len(names))))


def _storable(tag: str | None) -> str | None:
    """The tag; None where it holds half a surrogate pair or a NUL, which no database takes."""
    return None if tag is None or "\0" in tag or tag != tag.encode("utf-8", "replace").decode() else tag


def _tag(option: Node, key: str | None) -> str | None:
    if isinstance(option, Literal):
        value = option.value
        if isinstance(value, int) and value.bit_length() > LONG_INT:
            return None
        return str(value) if value is None or isinstance(value, (str, int, float, np.number, np.bool_)) else None
    if isinstance(option, Sequence) and option.items:
        return _string(option.items[0])
    if isinstance(option, Dict):
        strings = _strings(option)
        return strings.get(key) if key in strings else next(iter(strings.values()), None)
    return None


def _telling_key(label: str, dicts: list[Dict]) -> str | None:
    """The key under which every dict has a string of its own; the choice's own label comes first."""
    if not dicts:
        return None
    strings = [_strings(option) for option in dicts]
    for key in [label, *strings[0]]:
        if len({found[key] for found in strings if key in found}) == len(dicts):
            return key
    return None


def _strings(option: Dict) -> dict[str, str]:
    found = ((key, _string(item)) for key, item in option.items)
    return {key: text for key, text in found if text is not None}


def _string(node: Node) -> str | None:
    node = unshared(node)
    return node.value if isinstance(node, Literal) and isinstance(node.value, str) else None
