"""Commands as objectives: a template of a command line, and the arguments that a trial fills in.

No shell is used. Each word of the template becomes one argument of the program. The word ``{args}`` becomes one or more
arguments for each active label.
"""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice, pairwise
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, guess, one_line, short, similar
from shadho_celery.core.code import Digest, digest_of
from shadho_celery.core.files import CHECKPOINTS
from shadho_celery.core.names import RUN_COMMAND, named
from shadho_celery.core.trial import Params
from shadho_celery.errors import UsageError
from shadho_celery.objective import sources
from shadho_celery.objective.context import LocalContext

if TYPE_CHECKING:
    from shadho_celery.space.space import Space

#: placeholder of the arguments for all active labels; and placeholders of facts, which are attributes of the context
ARGS, FACTS = "args", ("budget", "seed", "trial", "checkpoint_dir")
#: names that no label may have
RESERVED = (ARGS, *FACTS)
#: form of one argument of ``{args}``
ARG = "--{label}={value}"

#: maximum number of files that are inputs, and of their bytes together
MOST_FILES, MAX_INPUTS = 1000, 2**26

#: matches an escaped brace, a placeholder, or an open brace that is neither, which is an error
_PART = re.compile(r"\{\{|\{([^{}]*)\}|\{")

#: match the name of a program that runs the script in its first argument; and the name of a script
_INTERPRETER, _SCRIPT = re.compile(r"(.*/)?(python[\d.]*|(ba|z|da)?sh)"), re.compile(r"[^{-][^{]*\.(py|sh)")


class LossPattern(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A regular expression for a line of a command's output. Its only group matches the loss."""

    pattern: Annotated[str, Meta(max_length=1000)]


class Values(NamedTuple):
    """Params of a trial for a command: the value of each active label, and the values in the shape of the space."""

    by_label: Mapping[str, Any]
    nested: Any


@dataclass(frozen=True, kw_only=True)
class Command:
    """A command that is the objective of a study. Called with a trial's `Values`, it runs and returns its result."""

    #: the program and its arguments, with placeholders
    words: tuple[str, ...]
    #: form of the arguments of one label in ``{args}``; spaces separate arguments
    arg: str = ARG
    #: name before the loss in the output, or pattern with one group that matches it; None for JSON lines alone
    loss: str | re.Pattern[str] | None = None
    #: relative paths or globs of the files that it reads, and of those that are kept
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    #: folder of the study, absolute
    folder: Path
    #: by path: digest of each file below `folder` that the words name, or that is an input
    files: Mapping[str, Digest] = field(default_factory=dict, compare=False)

    def __call__(self, params: Values, context: LocalContext) -> Any:
        return named(RUN_COMMAND)(self, self.arguments(params.by_label, context), params.nested, context)

    def values(self, space: Space) -> Callable[[Params], Values]:
        """Return a function that turns the params of a trial into `Values`."""
        # Imported late, because only commands need it.
        from shadho_celery.space.flat import FlatValues

        flat = FlatValues(space)
        return lambda params: Values(flat(params), space.evaluate(params))

    def arguments(self, values: Mapping[str, Any], context: LocalContext) -> list[str]:
        """Return the program and its arguments for a trial. Raises UsageError for a value that no argument can hold."""

        def filled(part: re.Match[str]) -> str:
            name = part[1]
            return "{" if name is None else _text(name, getattr(context, name) if name in FACTS else values[name])

        found: list[str] = []
        for word in self.words:
            if word == f"{{{ARGS}}}":
                found += (part for label, value in values.items() for part in self._of(label, value))
            else:
                found.append(_PART.sub(filled, word))
        return found

    def _of(self, label: str, value: Any) -> list[str]:
        """Return the arguments for one label in ``{args}``.

        If the form `arg` makes the label an option such as ``--label``, True becomes the option without a value, and
        False and None become no argument. In other forms, such as that of Hydra, they become true, false and null.
        """
        form = self.arg
        if re.match(r"-+\{label\}", form) and (value is None or isinstance(value, bool)):
            if not value:
                return []
            form = form.partition("{value}")[0].rstrip("= ")
        return [part.replace("{label}", label).replace("{value}", _text(label, value)) for part in form.split()]

    def check(self, space: Space, *, has_budgets: bool) -> None:
        """Raise UsageError unless every trial of `space` has a value for each placeholder."""
        from shadho_celery.space.flat import FlatValues

        nested = FlatValues(space).nested
        for label in space.domains:
            if label in RESERVED:
                raise UsageError(f"label {label!r} has the name of a placeholder of commands; give it another name")
        for word in self.words:
            for part in _PART.finditer(word):
                if part[0] == "{":
                    raise UsageError(f"{short(word)} in the command has an open brace; {{{{ stands for a brace")
                if part[1] == ARGS and word != part[0]:
                    raise UsageError(f"{short(word)} in the command: {part[0]} must be a word of its own")
                if part[1] == "budget" and not has_budgets:
                    raise UsageError(f"{part[0]} is in the command, but trials have no budgets; set fidelity")
                if unfit := nested if part[1] == ARGS else nested & {part[1]}:
                    hint = "give its options names, or read the file that SHADHO_PARAMS names"
                    raise UsageError(f"label {min(unfit)!r} has an option that is no text or number; {hint}")
                if part[1] is None or part[1] in RESERVED:
                    continue
                if part[1] not in space.domains:
                    hint = f"{guess(part[1], [*space.domains, *RESERVED])}{{{{ stands for a brace"
                    raise UsageError(f"{one_line(part[0], 60)} in the command is no label; {hint}")
                if space.conditions[part[1]] != ((),):
                    raise UsageError(f"{part[0]} in the command has no value in some trials; use {{{ARGS}}}")

    def check_program(self) -> None:
        """Raise UsageError if this machine cannot run the program, or the script that follows an interpreter."""
        program, script = (*self.words, "")[:2]
        if "{" not in program and not shutil.which(self.folder / program if "/" in program else program):
            hint = f"install it, or for a file in {self.folder} write ./NAME, and run chmod +x NAME"
            raise UsageError(f"there is no program {short(program, 200)} that can be run; {hint}")
        if _INTERPRETER.fullmatch(program) and _SCRIPT.fullmatch(script) and not (self.folder / script).exists():
            known = [path.name for path in islice(self.folder.glob("*.*"), MOST_FILES)]
            raise UsageError(
                f"there is no file {short(script, 200)} in {self.folder}; {similar(script, known)}correct it"
            )


def command_of(stated: Mapping[str, Any], folder: Path) -> Command:
    """Return the command in a study's settings. Raises UsageError if it is not valid."""
    if isinstance(loss := stated.get("loss"), Mapping):
        try:
            loss = re.compile(as_record(loss, LossPattern, "loss").pattern)
        except (re.error, RecursionError, OverflowError) as error:
            raise UsageError(f"loss.pattern: {short(error)}; give a regular expression") from None
        if loss.groups != 1:
            raise UsageError(f"loss.pattern has {loss.groups} groups; give it one, around the number")
    inputs, outputs = (tuple(stated.get(name) or ()) for name in ("inputs", "outputs"))
    words, arg = tuple(stated["command"]), stated.get("arg") or ARG
    return Command(words=words, arg=arg, loss=loss, inputs=inputs, outputs=outputs, folder=folder.absolute())


def files_of(command: Command) -> dict[str, Digest]:
    """Return digests by path: of the files in the study's folder that the command names, and of its inputs.

    For a Python file, the sources that it imports from the folder are included. Raises UsageError for invalid inputs.
    """
    files: dict[str, Digest] = {}
    for before, word in pairwise(("", *command.words)):
        module = word.replace(".", "/")
        names = {f"{module}.py", f"{module}/__main__.py"} if before == "-m" else {word, word.rpartition("=")[2]}
        for name in names:
            place = PurePosixPath(name)
            path = command.folder / place
            # Unlike `Path.is_file`, this accepts a word that is too long for a path.
            if place.is_absolute() or ".." in place.parts or not os.path.isfile(path):  # noqa: PTH113
                continue
            if place.suffix == ".py" and "." not in str(place.with_suffix("")):
                files |= sources.read(".".join(place.with_suffix("").parts), str(path)).files
            elif path.stat().st_size <= MAX_INPUTS:
                files[place.as_posix()] = digest_of(path.read_bytes())
    return files | _inputs(command)


def _inputs(command: Command) -> dict[str, Digest]:
    """Return the digest of each file that matches `inputs`, by its path. Raises UsageError for invalid inputs."""
    found: dict[Path, int] = {}
    for pattern in command.inputs:
        files = (path for path in command.folder.glob(pattern) if is_users(path, command.folder))
        matching = [*islice(files, MOST_FILES + 1)]
        if not matching:
            raise UsageError(f"inputs: {short(pattern)} is no file in {command.folder}; name files, such as data/*.csv")
        found |= {path: path.stat().st_size for path in matching}
    if outside := [path for path in found if not path.resolve().is_relative_to(command.folder.resolve())]:
        raise UsageError(f"inputs: {short(str(outside[0]))} is a link that leads out of the study's folder; copy it")
    if len(found) > MOST_FILES or sum(found.values()) > MAX_INPUTS:
        most = f"more than {MOST_FILES:,} files or {MAX_INPUTS:,} bytes"
        raise UsageError(f"inputs: {most}; leave them out, and read them from a folder that all machines share")
    return {path.relative_to(command.folder).as_posix(): digest_of(path.read_bytes()) for path in found}


def is_users(path: Path, folder: Path) -> bool:
    """Return whether a path below the study's folder is a file of the user, and not one that trials leave there."""
    return path.is_file() and path.relative_to(folder).parts[0] != CHECKPOINTS.parts[0]


def _text(label: str, value: Any) -> str:
    """Return a value as text. True, False and None are written as in JSON, and a path is absolute."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    if isinstance(value, (str, int, float, Path)):
        return str(value.absolute() if isinstance(value, Path) else value)
    raise UsageError(f"{{{label}}} in the command is {short(value, 60)}, which is no number and no text")
