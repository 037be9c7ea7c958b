"""Studies in TOML: a file with the settings of STUDY, a command, and a space in short forms of domains.

The short forms are in the table [space], or in placeholders of the command, such as ``{lr:log:1e-4:1e-1}``.
`write_command` writes a command that is given without a study file as a study in TOML, so that workers can read it from
a file on their own disk.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from shadho_celery.core.checks import as_record, check_name, short
from shadho_celery.core.code import CodeVersion, digest_of
from shadho_celery.core.files import COMMANDS, SWEEPS, below, read_toml, replacing
from shadho_celery.core.payload import MODULE_NAME
from shadho_celery.core.settings import SETTINGS
from shadho_celery.errors import UsageError
from shadho_celery.objective import study_file
from shadho_celery.objective.study_file import StudyFile
from shadho_celery.space.forms import DOMAIN, Domain, Known, form_of, nodes_of

#: maximum number of files of commands in a folder; with more, the oldest ones are deleted
MOST_COMMANDS = 1000

#: matches a placeholder that declares a label, or an escaped brace
_DECLARED = re.compile(r"\{\{|\{([^\s\"'{}:]+):([A-Za-z][^{}]*)\}")


class TomlStudy:
    """Reads studies in files with the suffix .toml. The methods are described in `Form`."""

    def load(self, name: str) -> StudyFile:
        if not re.match(MODULE_NAME, name):
            raise UsageError(f"{short(name, 200)}: rename it so that it has only letters, digits, dots, - and _")
        # The file of a command or sweep was written by this package, so the user does not know its name.
        written = {COMMANDS: "the command after --", SWEEPS: "hydra.sweeper"}
        shown = next((what for folder, what in written.items() if Path(name).is_relative_to(folder)), name)
        given, space = read_toml(study_file.path_of(name), shown, _read)
        stated = study_file.checked(name, given)
        return study_file.with_command(
            StudyFile(module=name, space=space, objective=None, stated=stated, code=self.version(name))
        )

    def settings(self, name: str) -> dict[str, object] | None:
        if (path := study_file.file_of(name)) is None:
            return None
        try:
            return read_toml(path, name, _stated)
        except UsageError:
            return {}

    def version(self, name: str) -> CodeVersion:
        path, digest = study_file.file_of(name) or Path(name), ""
        with suppress(OSError):
            digest = digest_of(path.read_bytes())
        return CodeVersion(root=str(path.absolute().parents[name.count("/")]), files={name: digest})


def _stated(content: Mapping[str, object]) -> dict[str, Any]:
    """Return the settings in a file. Raises UsageError for a key that is neither a setting nor `space`."""
    for key in content:
        check_name("key", key, ["space", *SETTINGS])
    return {key: value for key, value in content.items() if key != "space"}


def _read(content: Mapping[str, object]) -> tuple[dict[str, object], dict[str, Any]]:
    """Return the settings and the space in a file. Raises UsageError with the path of an invalid entry."""
    stated, forms = _stated(content), content.get("space", {})
    if not (words := stated.get("command")):
        raise UsageError('it lacks command, such as command = ["python", "train.py", "{args}"]')
    declared: list[tuple[str, Any]] = []
    if isinstance(words, list):
        stated["command"] = [_declare(word, declared) if isinstance(word, str) else word for word in words]
    if not isinstance(forms, Mapping) or not (declared or forms):
        raise UsageError(f"it lacks the table [space] with a domain for each label, {DOMAIN}")
    known: Known = {}
    return stated, nodes_of(declared, "command", known) | nodes_of(forms.items(), "space", known)


def _declare(word: str, forms: list[tuple[str, Any]]) -> str:
    """Return a word of a command without the domains in its placeholders. Add each label with its form to `forms`."""
    forms += [(label, form_of(form)) for label, form in _DECLARED.findall(word) if label]
    return _DECLARED.sub(lambda found: found[0] if found[1] is None else f"{{{found[1]}}}", word)


def resume_words(module: str, study: str, *options: str) -> list[str]:
    """Return the command that continues a study of this file, with `options`. A command after -- is given again."""
    # The file of a command was written by this package, so the user does not know its name.
    if Path(module).is_relative_to(COMMANDS):
        with suppress(KeyError, TypeError, UsageError):
            given: dict[str, Any] = read_toml(study_file.path_of(module), module, dict)
            words = [*(["--loss", given["loss"]] if "loss" in given else []), "--", *given["command"]]
            return ["shadho-celery", "run", "--resume", study, *options, *map(str, words)]
    return ["shadho-celery", "run", module, "--resume", study, *options]


def write_command(words: Sequence[str], loss: str | None = None) -> str:
    """Write a command with domains in its placeholders as a study in TOML. Return the path of the file.

    The path is the same whenever the command and `loss` are the same. Only the latest MOST_COMMANDS files are kept.
    Raises UsageError for an invalid placeholder.
    """
    forms: list[tuple[str, Any]] = []
    template = [_declare(word, forms) for word in words]
    if not forms:
        wrong = [f"{short(word)} has an open brace; " for word in words if re.search(r"\{[^{}]*\Z", word)]
        wrong += [f"{short(word)} has no domain; " for word in words if re.search(r"(?<!\{)\{[^{}]+\}", word)]
        raise UsageError(
            f"{''.join(wrong[:1])}after -- follows a command with a domain in at least one placeholder, such as "
            "shadho-celery run -- python train.py --lr {lr:log:1e-4:1e-1} --opt {opt:choice:adam:sgd}"
        )
    for label, form in forms:
        as_record(form, Domain, label, f"write {{{label}:log:LOW:HIGH}}, and :STEP for multiples of it")
    parts = [word for word in template[1:] if not word.startswith("-") and "{" not in word]
    content = {"command": words} if loss is None else {"command": words, "loss": loss}
    return write_study("shadho-celery run -- COMMAND", content, Path((parts or template)[0]).name, COMMANDS)


def write_study(origin: str, content: Mapping[str, object], program: str, folder: Path) -> str:
    """Write a study in TOML to a file that is named after a program. Return the path of the file.

    The text says that `origin` has written it. The path is the same whenever the arguments are the same. Only the
    latest MOST_COMMANDS files of the `folder` are kept. Raises UsageError if the file cannot be written.
    """
    stem = re.sub(r"[^\w-]+", "-", program.removesuffix(".py").removesuffix(".sh")).strip("-")
    try:
        lines = [f"# Written by: {origin}", *(f"{key} = {_toml(value)}" for key, value in content.items())]
        text = "\n".join(lines).encode()
    except UnicodeEncodeError:
        raise UsageError("the command has a word that is not text in UTF-8") from None
    path = below(folder, digest_of(text)) / f"{stem[:50] or 'command'}.toml"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with replacing(path) as file:
            file.write(text)
        for old in sorted(folder.iterdir(), key=os.path.getmtime)[:-MOST_COMMANDS]:
            shutil.rmtree(old, ignore_errors=True)
    except OSError as error:
        raise UsageError(f"{path} cannot be written: {error.strerror}; make room, or run in another folder") from None
    return path.as_posix()


def _toml(value: object) -> str:
    """Return a value in TOML, on one line."""
    if isinstance(value, Mapping):
        return f"{{{', '.join(f'{_toml(str(key))} = {_toml(each)}' for key, each in value.items())}}}"
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(_toml, value))}]"
    if isinstance(value, float):
        return str(value)
    # TOML refuses the one control character that JSON does not escape.
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
