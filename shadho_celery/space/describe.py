"""Texts of a compiled space: to compare it with a stored space, to name options, and to show values.

They are the same in every process.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping
from collections.abc import Sequence as SequenceOf
from itertools import islice
from typing import Any

import numpy as np

from shadho_celery.space.literals import LONG_INT, digest, literal_text
from shadho_celery.space.tree import (
    Call,
    Dict,
    Literal,
    Node,
    Param,
    Sequence,
    Switch,
    children,
    converted,
    nodes,
    unshared,
)

#: version of these texts. It is stored with them, and a study with another version cannot be resumed
VERSION = 4

#: maximum length of a text; a longer text is replaced by its beginning and its hash
MAX_TEXT = 200
#: maximum number of nested tuples and dicts of an option that are shown
MAX_LEVELS = 5
#: maximum length of an option's name that is made from its text
MAX_NAME = 40
#: text that is shown instead of a drawn value
DRAWN = "..."
#: types of constants that may name an option
_SCALARS = (str, int, float, np.number, np.bool_)


def structure(root: Node) -> dict[Node, str]:
    """Return a text for each node under `root`, which describes the computation of its value."""
    texts: dict[Node, str] = {}
    for node in nodes(root):
        texts[node] = cut(_node_text(node, texts))
    return texts


def expressions(root: Node, texts: Mapping[Node, str]) -> dict[str, list[str]]:
    """Return by label the texts of its `outermost_calls`, sorted. The float() and int() of hyperopt are left out."""
    found: dict[str, set[str]] = {}
    for label, calls in outermost_calls(root).items():
        own = (f"float(<{label}>)", f"int(<{label}>)", f"int(float(<{label}>))")
        if written := {texts[call] for call in calls} - {*own}:
            found[label] = written
    return {label: sorted(calls) for label, calls in found.items()}


def outermost_calls(root: Node) -> dict[str, list[Node]]:
    """Return by label the calls that use only this label and are not part of another such call."""
    labels: dict[Node, frozenset[str]] = {}
    order = list(nodes(root))
    for node in order:
        own = [node.label] if isinstance(node, Param) else []
        # At most two labels are kept for each node, because sets of all labels would be slow in a large space.
        labels[node] = frozenset(
            islice(sorted({*own, *(label for child in children(node) for label in labels[child])}), 2)
        )
    found: dict[str, list[Node]] = {}
    inside: set[Node] = set()
    for node in reversed(order):
        is_call = isinstance(node, Call) and len(labels[node]) == 1
        if is_call and node not in inside:
            (label,) = labels[node]
            found.setdefault(label, []).append(node)
        if is_call or node in inside:
            inside.update(children(node))
    return found


def whole_labels(root: Node) -> frozenset[str]:
    """Return the labels whose draws are converted by int() wherever they are used."""
    uses: dict[str, set[bool]] = {}
    for node in (Sequence((root,)), *nodes(root)):
        for child in children(node) if converted(node) is None else ():
            if (label := converted(child)) is not None:
                last = unshared(child)
                uses.setdefault(label, set()).add(isinstance(last, Call) and last.function is int)
    return frozenset(label for label, are_whole in uses.items() if are_whole == {True})


def _node_text(node: Node, texts: dict[Node, str]) -> str:
    parts = [texts[child] for child in children(node)]
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


def option_text(option: Node) -> str:
    """Return an option as text: constants as in Python code, and an ellipsis for each drawn value."""
    return cut(_option_text(unshared(option), MAX_LEVELS, lambda _: DRAWN))


def _option_text(node: Node, levels: int, drawn: Callable[[Node], str]) -> str:
    match node:
        case Literal(value=value):
            return literal_text(value.item() if isinstance(value, np.generic) else value)
        case Sequence(items=items) if levels:
            parts = [_option_text(unshared(item), levels - 1, drawn) for item in items]
            return f"({parts[0]},)" if len(parts) == 1 else f"({', '.join(parts)})"
        case Dict(items=items) if levels:
            pairs = [f"{key!r}: {_option_text(unshared(item), levels - 1, drawn)}" for key, item in items]
            return f"{{{', '.join(pairs)}}}"
        case _:
            return drawn(node)


def outline(option: Node, levels: int = MAX_LEVELS) -> Any:
    """Return an option with its constants, tuples and dicts, and with DRAWN for drawn values and deeper levels."""
    match unshared(option):
        case Literal(value=value):
            value = value.item() if isinstance(value, np.generic) else value
            return value if value is None or type(value) in (bool, int, float, str) else literal_text(value)
        case Sequence(items=items) if levels:
            return tuple([outline(item, levels - 1) for item in items])
        case Dict(items=items) if levels:
            return {key: outline(item, levels - 1) for key, item in items}
    return DRAWN


def brief(value: object) -> str:
    """Return values as a short text, with rounded numbers."""
    if isinstance(value, float):
        # A float without a fraction, such as a width, is not rounded.
        return f"{value:.0f}" if value.is_integer() and abs(value) < 1e15 else f"{value:.5g}"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {brief(part)}" for key, part in value.items()) + "}"
    if isinstance(value, (tuple, list)):
        return "(" + ", ".join(map(brief, value)) + ")"
    return str(value)


def unlike(shown: SequenceOf[Any], options: SequenceOf[Node]) -> tuple[list[Any], list[int]]:
    """Return distinct forms of a choice's options, and the places of options whose texts are equal.

    If the forms `shown` all differ, as values and as texts, they are returned; an empty text counts as equal to others,
    because it would not be visible in a table. Otherwise the texts of the options are returned. To equal texts the
    option's index is added, so these forms have no meaning in another space.
    """
    if len({*shown}) == len({*map(str, shown)} - {""}) == len(shown):
        return [*shown], []
    plain = [unshared(option) for option in options]
    texts = [cut(literal_text(node.value)) if isinstance(node, Literal) else option_text(node) for node in plain]
    counts = Counter(texts)
    alike = [place for place, text in enumerate(texts) if counts[text] > 1]
    return [f"{text} #{place}" if counts[text] > 1 else text for place, text in enumerate(texts)], alike


def cut(text: str) -> str:
    """Return a text. If it is too long, return its beginning and its hash."""
    return text if len(text) <= MAX_TEXT else f"{text[: MAX_TEXT - 20]}... {digest(text)}"


def option_names(label: str, options: SequenceOf[Node]) -> tuple[str, ...]:
    """Return a name for each option: its tag (`option_tags`), else its text with labels for drawn values, else its
    index.

    The middle of a long text is cut out.
    """
    tags = option_tags(label, options, with_numbers=True)
    words = [_name_of(option) if tag is None else tag for option, tag in zip(options, tags, strict=True)]
    counts = Counter(words)
    names = [str(place) if word is None or counts[word] > 1 else word for place, word in enumerate(words)]
    # A tag may be equal to the index of another option. Then all names are indexes.
    return tuple(names) if len(set(names)) == len(names) else tuple(map(str, range(len(names))))


def option_tags(label: str, options: SequenceOf[Node], *, with_numbers: bool = False) -> list[str | None]:
    """Return a tag for each option: a word that identifies it. An option without a tag of its own gets None.

    The tag of a string, number, bool or None is the option itself. The tag of a tuple is its first item, if this is a
    string. The tag of a dict is the string under the choice's label, else the string under the first key by which all
    dicts differ, else the first string. If `with_numbers`, a number or bool is used if the dicts do not differ by a
    string.
    """
    plain = [unshared(option) for option in options]
    dicts = [option for option in plain if isinstance(option, Dict)]
    kind: tuple[type, ...] = (str,)
    key = _telling_key(label, [_texts(option, kind) for option in dicts])
    if key is None and with_numbers:
        kind = _SCALARS
        key = _telling_key(label, [_texts(option, kind) for option in dicts])
    tags = [_tag(option, key, kind) for option in plain]
    counts = Counter(tags)
    return [tag if tag is not None and counts[tag] == 1 and is_storable(tag) else None for tag in tags]


def _name_of(option: Node) -> str | None:
    """Return an option's text with labels instead of drawn values; None if it has neither constants nor labels."""
    text = _option_text(unshared(option), MAX_LEVELS, _drawn_label)
    return _shortened(text) if is_storable(text) and text != DRAWN else None


def _drawn_label(node: Node) -> str:
    """Return the label from which a node is drawn. If this is not exactly one label, return DRAWN."""
    if isinstance(node, Switch):
        node = node.index
    labels = {each.label for each in nodes(node) if isinstance(each, Param)}
    return labels.pop() if len(labels) == 1 else DRAWN


def _shortened(text: str) -> str:
    return text if len(text) <= MAX_NAME else f"{text[: MAX_NAME // 2 - 2]}...{text[-(MAX_NAME // 2 - 1) :]}"


def is_storable(tag: str) -> bool:
    """Return whether databases accept a tag: it must not have an unpaired surrogate or a NUL."""
    return "\0" not in tag and tag == tag.encode("utf-8", "replace").decode()


def _tag(option: Node, key: str | None, kind: tuple[type, ...]) -> str | None:
    match option:
        case Literal(value=None):
            return "None"
        case Literal():
            return _text(option, _SCALARS)
        case Sequence(items=(first, *_)):
            return _text(first, (str,))
        case Dict():
            texts = _texts(option, kind)
            return texts.get(key) if key in texts else next(iter(_texts(option, (str,)).values()), None)
    return None


def _telling_key(label: str, dicts: list[dict[str, str]]) -> str | None:
    """Return a key under which all dicts have different texts, or None. The choice's own label is tried first."""
    keys = [label, *dicts[0]] if dicts else []
    return next((key for key in keys if len({found[key] for found in dicts if key in found}) == len(dicts)), None)


def _texts(option: Dict, kind: tuple[type, ...]) -> dict[str, str]:
    """Return by key the texts of the constants of these kinds in a dict."""
    found = ((key, _text(item, kind)) for key, item in option.items)
    return {key: text for key, text in found if text is not None}


def _text(node: Node, kind: tuple[type, ...]) -> str | None:
    node = unshared(node)
    is_one = isinstance(node, Literal) and isinstance(node.value, kind) and not _is_long(node.value)
    return str(node.value) if isinstance(node, Literal) and is_one else None


def _is_long(value: object) -> bool:
    return isinstance(value, int) and value.bit_length() > LONG_INT
