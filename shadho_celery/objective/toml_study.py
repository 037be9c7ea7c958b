"""A study in TOML alone: the settings of STUDY with a command, and its space in short forms.

The same short forms are in placeholders of a command that is given without a file, such as ``{lr:log:1e-4:1e-1}``. A
study in TOML is made of them, so that workers read the command from a file on their own disk.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, guess, short
from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.core.files import COMMANDS, below, read_toml, replacing
from shadho_celery.core.payload import MODULE_NAME
from shadho_celery.core.settings import SETTINGS
from shadho_celery.core.system import load_hyperopt_late
from shadho_celery.core.trial import Finite, Positive
from shadho_celery.errors import UsageError
from shadho_celery.objective import sources, study_file
from shadho_celery.objective.command import RESERVED

if TYPE_CHECKING:
    from shadho_celery.objective.study_file import StudyFile

#: maximum number of options of a choice, and of choices inside one another
MOST_OPTIONS, MAX_CHOICES = 1000, 10

_Range = Annotated[tuple[Finite, Finite], Meta(description="two numbers, such as [0, 1]")]

#: name of a label; placeholders and the file itself can hold it
_LABEL = re.compile(r"[^\s{}:\x00-\x1f\x7f]{1,200}")
_DOMAIN = "such as {uniform = [0, 1]}, {log = [1e-4, 1e-1]}, {int = [1, 9]} or {choice = ['adam', 'sgd']}"
#: a placeholder that declares a label, or an escaped brace
_DECLARED = re.compile(r"\{\{|\{([^{}:]*):([^{}]*)\}")


class Domain(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The short form of one label's domain: one law with its ends, or a choice."""

    uniform: _Range | None = None
    log: _Range | None = None
    int: _Range | None = None
    logint: _Range | None = None
    normal: _Range | None = None
    #: True for a choice, whose options are checked by `_options`
    choice: bool = False
    #: numbers are multiples of it
    step: Positive | None = None


class TomlStudy:
    """The form of studies in files with the suffix .toml; see `Form`."""

    def load(self, name: str) -> StudyFile:
        path = _file(name)
        code = self.version(name)
        content = read_toml(path, name, lambda content: content, "see objective/README.md, Commands")
        try:
            given, space = _stated(content), _space(content)
            if not given.get("command"):
                raise UsageError('it lacks command, such as command = ["python", "train.py", "{args}"]')
        except UsageError as error:
            raise UsageError(f"{name}: {error}") from None
        file = study_file.StudyFile(
            module=name, space=space, objective=None, stated=study_file.checked(name, given), code=code
        )
        if edited := sources.DiskWatch().edited(code):
            raise UsageError(f"{edited} was edited while it was read; try again")
        return study_file.with_command(file)

    def settings(self, name: str) -> dict[str, object] | None:
        if (path := study_file.file_of(name)) is None:
            return None
        try:
            return _stated(read_toml(path, name, lambda content: content))
        except UsageError:
            return {}

    def version(self, name: str) -> CodeVersion:
        path = study_file.file_of(name)
        if path is None:
            return CodeVersion(root=str(Path.cwd()), files={name: ""})
        root = path.absolute().parents[name.count("/")]
        return CodeVersion(root=str(root), files={name: digest_of(path.read_bytes())})


def _file(name: str) -> Path:
    if not re.match(MODULE_NAME, name):
        raise UsageError(f"{short(name, 200)}: rename it so that it has only letters, digits, dots, - and _")
    if (path := study_file.file_of(name)) is None:
        raise study_file.no_file(name)
    return path


def _stated(content: Mapping[str, object]) -> dict[str, object]:
    """Return the settings in the content of a file. Raises UsageError for another key."""
    for key in content:
        if key != "space" and key not in SETTINGS:
            known = ["space", *SETTINGS]
            raise UsageError(
                f"{short(key, 60)[1:-1]}: there is no such key; {guess(key, known)}known are {', '.join(known)}"
            )
    return {key: value for key, value in content.items() if key != "space"}


def _space(content: Mapping[str, object]) -> dict[str, Any]:
    """Return the space in the content of a file. Raises UsageError with the path of what is not valid."""
    table = content.get("space")
    if not isinstance(table, Mapping) or not table:
        raise UsageError(f"it lacks the table [space] with a domain for each label, {_DOMAIN}")
    load_hyperopt_late()
    return _Reader().labels(table, "space", MAX_CHOICES)


class _Reader:
    """Makes a space of hyperopt from short forms."""

    def __init__(self) -> None:
        #: form and node of each label: a label that is in two options of a choice has one node
        self._known: dict[str, tuple[object, Any]] = {}

    def labels(self, table: Mapping[str, Any], where: str, levels: int) -> dict[str, Any]:
        """Return the labels of a table, each with its node."""
        if levels == 0:
            raise UsageError(f"{short(where)}: choices are nested more than {MAX_CHOICES} deep")
        return {label: self._label(label, form, f"{where}.{label}", levels) for label, form in table.items()}

    def _label(self, label: str, form: Any, where: str, levels: int) -> Any:
        if not _LABEL.fullmatch(label):
            raise UsageError(f"{short(where)}: give the label a name without spaces, colons and braces")
        if label in RESERVED:
            raise UsageError(f"{where}: {label} is the name of a placeholder of commands; give it another name")
        if not isinstance(form, Mapping):
            raise UsageError(f"{where}: {short(form, 60)} is no domain; write one, {_DOMAIN}")
        if label in self._known:
            known, node = self._known[label]
            if known != form:
                raise UsageError(f"{where}: this label has another domain elsewhere; give it another name")
            return node
        node = self._node(label, form, where, levels)
        self._known[label] = form, node
        return node

    def _node(self, label: str, form: Mapping[str, Any], where: str, levels: int) -> Any:
        from hyperopt import hp
        from hyperopt.pyll import scope

        domain = as_record({**form, "choice": True} if "choice" in form else form, Domain, where)
        given = [name for name in form if name != "step"]
        if len(given) != 1:
            raise UsageError(f"{where}: {' and '.join(given) or 'nothing'} is given; give one domain, {_DOMAIN}")
        law, step = given[0], domain.step
        where = f"{where}.{law}"
        if law == "choice":
            if step is not None:
                raise UsageError(f"{where}: a choice has no step")
            return hp.choice(label, self._options(label, form["choice"], where, levels))
        low, high = getattr(domain, law)
        if law == "normal":
            if high <= 0:
                raise UsageError(f"{where}: the deviation {high:g} is not above 0; give [mean, deviation]")
            return hp.normal(label, low, high) if step is None else hp.qnormal(label, low, high, step)
        if not low < high:
            raise UsageError(f"{where}: {low:g} is not below {high:g}; give [low, high]")
        is_whole, is_log = law in {"int", "logint"}, law in {"log", "logint"}
        if is_log and low <= 0:
            raise UsageError(f"{where}: {low:g} is not above 0, and has no logarithm; give the ends themselves")
        if is_whole and not all(map(float.is_integer, (low, high, step or 1.0))):
            raise UsageError(f"{where}: give whole numbers")
        if is_log:
            low, high = math.log(low), math.log(high)
        if is_whole:
            return scope.int((hp.qloguniform if is_log else hp.quniform)(label, low, high, step or 1))
        if step is None:
            return (hp.loguniform if is_log else hp.uniform)(label, low, high)
        return (hp.qloguniform if is_log else hp.quniform)(label, low, high, step)

    def _options(self, label: str, options: object, where: str, levels: int) -> list[Any]:
        """Return the options of a choice: plain values, or with the labels of each by its name."""
        if not isinstance(options, (list, Mapping)) or not options or len(options) > MOST_OPTIONS:
            form = "a list of texts and numbers, or a table of named options with their labels"
            raise UsageError(f"{where}: give {form}, at most {MOST_OPTIONS:,}")
        if isinstance(options, Mapping):
            return [self._option(label, name, each, f"{where}.{name}", levels) for name, each in options.items()]
        for place, option in enumerate(options):
            if not isinstance(option, (str, bool, int, float)) or (
                isinstance(option, float) and not math.isfinite(option)
            ):
                raise UsageError(
                    f"{where}[{place}]: {short(option, 60)} is not a text or a finite number; an option with labels of "
                    f"its own is a table {short(where)[1:-1]}.NAME"
                )
        return options

    def _option(self, label: str, name: str, table: object, where: str, levels: int) -> Any:
        """Return a named option: its name, or with labels a dict whose first key is the choice's own label."""
        if not isinstance(table, Mapping):
            raise UsageError(f"{short(where)}: this is not a table of labels; write {{}} for an option without labels")
        if label in table:
            raise UsageError(f"{where}.{label}: a label has the name of its own choice; give it another name")
        return {label: name, **self.labels(table, where, levels - 1)} if table else name


def write_command(words: Sequence[str], loss: str | None = None) -> str:
    """Write a command with domains in its placeholders as a study in TOML. Return the name of the file.

    The same command has the same file. Raises UsageError for an invalid placeholder.
    """
    forms: dict[str, Any] = {}

    def declare(found: re.Match[str]) -> str:
        if (label := found[1]) is None:
            return found[0]
        form = _form(label, found[2].split(":"), found[0])
        if forms.setdefault(label, form) != form:
            raise UsageError(
                f"{short(found[0])}: {label} has another domain elsewhere in the command; write {{{label}}}"
            )
        return f"{{{label}}}"

    template = [_DECLARED.sub(declare, word) for word in words]
    if not words or not forms:
        raise UsageError(
            "after -- follows a command with a domain in at least one placeholder, such as "
            "shadho-celery run -- python train.py --lr {lr:log:1e-4:1e-1} --opt {opt:choice:adam:sgd}"
        )
    lines = [f"command = {_toml(template)}", *([] if loss is None else [f"loss = {_toml(loss)}"]), "", "[space]"]
    lines += [f"{_toml(label)} = {_toml(form)}" for label, form in forms.items()]
    try:
        content = "\n".join(["# Written by: shadho-celery run -- COMMAND", *lines, ""]).encode()
    except UnicodeEncodeError:
        raise UsageError("a word of the command is not text in UTF-8; rename the file, or write a study file") from None
    parts = [word for word in template[1:] if not word.startswith("-") and "{" not in word]
    stem = re.sub(r"[^\w-]+", "-", Path((parts or template)[0]).name.removesuffix(".py").removesuffix(".sh")).strip("-")
    path = below(COMMANDS, digest_of(content)) / f"{stem[:50] or 'command'}.toml"
    path.parent.mkdir(parents=True, exist_ok=True)
    with replacing(path) as file:
        file.write(content)
    return path.as_posix()


def _form(label: str, parts: list[str], shown: str) -> dict[str, Any]:
    """Return the short form of a placeholder's domain, whose `parts` the colons separate."""
    law, *given = parts
    if law == "choice":
        return {law: [*map(_plain, given)]}
    laws = [name for name in Domain.__struct_fields__ if name != "step"]
    if law not in laws:
        raise UsageError(
            f"{short(shown)}: there is no domain {short(law, 60)}; {guess(law, laws)}known are {', '.join(laws)}"
        )
    try:
        low, high, *step = map(float, given)
        return {law: [low, high], **dict(zip(("step",), step, strict=True) if step else ())}
    except ValueError:
        raise UsageError(f"{short(shown)}: write {{{label}:{law}:LOW:HIGH}}, and :STEP for multiples of it") from None


def _plain(text: str) -> Any:
    """Return a number or truth value that has this text as an argument, else the text itself."""
    kinds: tuple[Callable[[str], Any], ...] = ({"true": True, "false": False}.__getitem__, int, float)
    for kind in kinds:
        try:
            if (value := kind(text)) in (True, False) or str(value) == text:
                return value
        except (KeyError, ValueError):
            continue
    return text


def _toml(value: Any) -> str:
    """Return a value in TOML: a text, a number, a list of them, or a table in one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{key} = {_toml(each)}' for key, each in value.items())}}}"
    # TOML refuses the one control character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
