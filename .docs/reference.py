"""Makes the pages of reference from the code, as Markdown: each function returns the text of one page."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterable, Iterator
from itertools import groupby
from pathlib import Path
from typing import Any

import click
from click.testing import CliRunner

import shadho_celery
from shadho_celery import context as context_module
from shadho_celery import errors as errors_module
from shadho_celery.cli.group import COMMANDS
from shadho_celery.cli.group import commands as group
from shadho_celery.core import columns
from shadho_celery.core.records import AttemptRecord, End, Leaving, MachineRecord, SessionRecord
from shadho_celery.core.settings import SETTINGS, Setting
from shadho_celery.core.trial import Words
from shadho_celery.metrics import fleet, run, worker
from shadho_celery.metrics.server import Family
from shadho_celery.objective.context import Context
from shadho_celery.results import study as study_module
from shadho_celery.results.report import OfRecord, Overview, StudyFacts, StudyReport
from shadho_celery.results.study import study_json

PACKAGE = Path(shadho_celery.__file__).parent

#: variables that the package sets for its own processes
OWN = {
    "SHADHO_CELERY_COMPLETE",
    "SHADHO_CONTROL_KEY_FILE",
    "SHADHO_DEVICE",
    "SHADHO_EMBEDDED",
    "SHADHO_RUNNER",
    "SHADHO_TRACKED_STORE",
    "SHADHO_WITHIN",
}
VARIABLE = re.compile(r"\b(?:SHADHO_[A-Z_]*[A-Z]|CELERY_BROKER_URL)\b")


def table(heads: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    """Return a table."""
    lines = [[*heads], ["---" for _ in heads], *rows]
    return "\n".join(
        f"| {' | '.join(' '.join(cell.replace('|', chr(92) + '|').split()) for cell in row)} |" for row in lines
    )


def block(text: str, language: str = "text") -> str:
    """Return a block of code."""
    return f"```{language}\n{text.rstrip()}\n```\n"


def prose(docstring: str | None) -> str:
    """Return a docstring as Markdown: indented lines after `::` become blocks of code."""
    text = inspect.cleandoc(docstring or "")
    text = re.sub(r"(?:^::|(?<=\w)::|^(?=Examples:))$", "", text, flags=re.MULTILINE)
    return re.sub(r"``", "`", text)


def citation() -> str:
    """Return the entry of BibTeX for this version of the software."""
    title = "shadho\\_celery: hardware-aware distributed hyperparameter search on Celery"
    lines = [f"  title   = {{{title}}},", "  year    = {2026},", f"  version = {{{shadho_celery.__version__}}},"]
    return block("\n".join(["@software{shadho_celery,", *lines, "}"]))


# Commands


def commands() -> str:
    """Return a table of the commands, and the help of each."""
    rows = ((f"[`{name}`](#{name})", line) for name, (_, _, line) in COMMANDS.items())
    return "\n".join([table(("command", "does"), rows), "", *(_helped([name]) for name in COMMANDS)])


def _helped(words: list[str]) -> str:
    command: Any = group
    for word in words:
        command = command.get_command(click.Context(command), word)
    shown = CliRunner().invoke(group, [*words, "--help"], prog_name="shadho-celery", terminal_width=100)
    parts = [f"{'#' * (len(words) + 1)} {' '.join(words)}\n", block(shown.output)]
    if isinstance(command, click.Group):
        parts += [_helped([*words, name]) for name in command.list_commands(click.Context(command))]
    return "\n".join(parts)


# Settings and facts


def settings() -> str:
    """Return a table of the keys of STUDY."""
    return table(("key", "option, default", "value", "effect"), (_setting(each) for each in SETTINGS.values()))


def _setting(each: Setting) -> tuple[str, str, str, str]:
    default = each.default if each.shown_default is None else each.shown_default
    shown = "" if default in (None, "", (), False) else f"{default:g}" if isinstance(default, float) else str(default)
    option = f"`{each.flag}`" if each.help else ""
    return f"`{each.name}`", ", ".join(filter(None, [option, shown])), each.meaning, each.help


def facts() -> str:
    """Return a table of the facts of a trial that JSON and exported tables have."""
    in_tables = {*columns.names(columns.Shown.FRONT, columns.Shown.DATE, columns.Shown.END)}
    known = {fact.name: fact for fact in columns.FACTS.values()}
    rows = ((f"`{name}`", "yes" if name in in_tables else "", known[name].__doc__ or "") for name in columns.names())
    return table(("name", "in csv and parquet", "meaning"), rows)


def metrics() -> str:
    """Return a table of the metrics of a run, of a worker, and of a fleet."""
    heads = {"run": run.FAMILIES, "worker": worker.FAMILIES, "fleet": fleet.FAMILIES}
    return "\n\n".join(
        f"## Of a {of}\n\n{table(('name', 'labels', 'meaning'), map(_metric, families))}"
        for of, families in heads.items()
    )


def _metric(family: Family[Any]) -> tuple[str, str, str]:
    return " ".join(f"`{name}`" for name in family.names), ", ".join(f"`{each}`" for each in family.labels), family.help


# JSON


def study() -> str:
    """Return a table of the names in the JSON of a study: with comments beside the names, or those of a report."""
    lines = inspect.getsource(study_module).splitlines()
    known = {name: meaning for each in (Overview, StudyReport) for name, _, meaning in _fields(each)}
    known |= {name: fact.__doc__ for name, fact in vars(StudyFacts).items() if isinstance(fact, OfRecord)}
    for number, line in enumerate(lines, 1):
        if comment := _comment(lines, number):
            known |= dict.fromkeys(re.findall(r'"(\w+)": ', line), " ".join(comment))
    with shadho_celery.Study({}) as example:
        names = [*study_json(example.read_report()), "best_loss"]
    return _joined("of a study", ((name, known[name]) for name in names))


def records() -> str:
    """Return tables of the fields of attempts, sessions and machines, and of the ends of the first two."""
    owners = {"an attempt": AttemptRecord, "a session": SessionRecord, "a machine": MachineRecord}
    ends = {"of an attempt": End, "of a session": Leaving}
    return "\n\n".join(
        [
            *(_joined(f"of {of}", ((name, text) for name, _, text in _fields(each))) for of, each in owners.items()),
            *(_joined(f"end {of}", _words(each)) for of, each in ends.items()),
        ]
    )


def _joined(head: str, rows: Iterable[tuple[str, str]]) -> str:
    """Return a table in which neighbours with the same meaning have one row."""
    grouped = (([name for name, _ in same], meaning) for meaning, same in groupby(rows, lambda row: row[1]))
    shown = ((", ".join(f"`{name}`" for name in names), _sentence(text)) for names, text in grouped)
    return table((head, "meaning"), shown)


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{prose(text[1:]).removesuffix('.')}."


def _body(owner: type) -> tuple[list[str], list[ast.stmt]]:
    """Return the lines of a class, and its statements."""
    source = inspect.getsource(owner)
    [node] = ast.parse(source).body
    assert isinstance(node, ast.ClassDef)
    return source.splitlines(), node.body


def _fields(owner: type) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and comment of the fields of a record; a field without a comment has that of the one above."""
    lines, body = _body(owner)
    meaning = ""
    for node in body:
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
            meaning = " ".join(_comment(lines, node.lineno)) or meaning
            yield node.target.id, ast.unparse(node.annotation), meaning


def _words(owner: type[Words]) -> Iterator[tuple[str, str]]:
    """Yield the words of an enumeration with their comments."""
    lines, body = _body(owner)
    for node in body:
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant):
            yield node.value.value, " ".join(_comment(lines, node.lineno)) or "as the state of its trial"


# Python


def context() -> str:
    """Return the members of a trial's context, and the exceptions of its module."""
    rows = ((f"`{name}`", f"`{kind}`", meaning) for name, kind, meaning in _fields(Context))
    parts = [table(("attribute", "type", "meaning"), rows), ""]
    parts += [_described(name, member, "##") for name, member in vars(Context).items() if not name.startswith("_")]
    parts.append("## Other names of the module\n")
    parts += [_described(name, getattr(context_module, name), "###") for name in context_module.__all__[1:]]
    return "\n".join(parts)


def python() -> str:
    """Return the names of the package with their docstrings, without those of hyperopt."""
    names = [name for name in shadho_celery.__all__ if shadho_celery._LAZY.get(name, "hyperopt") != "hyperopt"]
    return "\n".join(_described(name, getattr(shadho_celery, name), "##") for name in names)


def errors() -> str:
    """Return the tree of errors, and the message of each."""
    found = [
        each
        for each in vars(errors_module).values()
        if isinstance(each, type) and each.__module__ == errors_module.__name__
    ]
    _, tree, after = re.split(r"::\n\n|\n\n(?=The docstring)", errors_module.__doc__ or "")
    rows = ((f"`{each.__name__}`", each.__doc__ or "", str(each.exit_code)) for each in found)
    return "\n".join([block(inspect.cleandoc(tree)), prose(after), "", table(("error", "message", "exit code"), rows)])


def _described(name: str, found: Any, level: str, owner: str = "") -> str:
    """Return a heading, the signature and the docstring of a function or class, and the methods of a class."""
    parts = [f"{level} {owner}{name}\n"]
    if isinstance(found, property):
        return "\n".join([*parts, prose(found.__doc__), ""])
    try:
        shown = re.sub(r"(: |-> )'([^']*)'(?=[,) =:]|$)", r"\1\2", str(inspect.signature(found)))
        shown = re.sub(r"^\(self(, )?", "(", re.sub(r"<object object at \w+>", "...", shown))
        parts.append(block(_wrapped(f"{name}{shown}"), "text"))
    except (TypeError, ValueError):
        pass
    parts += [prose(found.__doc__), ""]
    if isinstance(found, type):
        members = {key: member for base in reversed(found.__mro__[:-1]) for key, member in vars(base).items()}
        own = found.__module__.startswith("shadho_celery") and not issubclass(found, BaseException)
        parts += [
            _described(key, member, f"{level}#", f"{name}.")
            for key, member in sorted(members.items())
            if own
            and not key.startswith("_")
            and (inspect.isfunction(member) or isinstance(member, property))
            and member.__doc__
        ]
    return "\n".join(parts)


def _wrapped(signature: str) -> str:
    """Return a signature with each argument in a line if it is long."""
    if len(signature) <= 100:
        return signature
    depth, parts, begin = 0, [], signature.index("(") + 1
    end = signature.rindex(") ->") if ") ->" in signature else signature.rindex(")")
    for at in range(begin, end):
        depth += (signature[at] in "([{") - (signature[at] in ")]}")
        if signature[at] == "," and not depth:
            parts.append(signature[begin:at].strip())
            begin = at + 1
    parts.append(signature[begin:end].strip())
    return "\n".join([signature[: signature.index("(") + 1], *(f"    {each}," for each in parts), signature[end:]])


def _comment(lines: list[str], number: int) -> list[str]:
    """Return the lines of the `#:` comment above the line with this number."""
    found: list[str] = []
    while (above := lines[number - 2 - len(found)].strip()).startswith("#:"):
        found.insert(0, above.removeprefix("#:").strip())
    return found


# Environment variables


def environment() -> str:
    """Return a table of the environment variables: of options, of celeryconfig.py, and of constants with a comment."""
    known: dict[str, str] = {}
    for names, text in (*_of_options(), *_of_configuration(), *_of_constants(), *_of_docstrings(), *_of_help()):
        for name in names:
            known.setdefault(name, prose(text))
    return table(("variable", "meaning"), ((f"`{name}`", known[name]) for name in sorted({*known} - OWN)))


def script_variables() -> str:
    """Return a table of the variables that the command of a trial gets."""
    found = {name: text for names, text in _of_constants(PACKAGE / "objective" / "script.py") for name in names}
    return table(("variable of the command", "meaning"), ((f"`{name}`", text) for name, text in found.items()))


def endings() -> str:
    """Return a table of the options of a worker that say when it ends, each with its variable."""
    options = {option.opts[0]: option for option in group.get_command(click.Context(group), "worker").params}
    shown = (
        (name, *options[name].help.split("  [env: "))
        for name in ("--grace", "--preempt-signal", "--for", "--idle-exit")
    )
    return table(("option, variable", "meaning"), ((f"`{name}`, `{of[:-1]}`", text) for name, text, of in shown))


def _commands(command: Any) -> Iterator[tuple[str, click.Command]]:
    for name in command.list_commands(click.Context(command)):
        found = command.get_command(click.Context(command), name)
        yield name, found
        if isinstance(found, click.Group):
            yield from ((f"{name} {below}", each) for below, each in _commands(found))


def _of_options() -> Iterator[tuple[list[str], str]]:
    for name, command in _commands(group):
        for option in command.params:
            text = getattr(option, "help", None) or ""
            noted = [cell.cell_contents for cell in getattr(option.callback, "__closure__", None) or ()]
            names = VARIABLE.findall(" ".join(re.findall(r"env[^:\]]*: ([^\]]*)\]", text)))
            names += [each for each in noted if isinstance(each, str) and VARIABLE.fullmatch(each)]
            said = re.sub(r"  \[.*", "", text)
            yield names, f"Option `{option.opts[0]}` of `{name}`. {said}"


def _of_configuration() -> Iterator[tuple[list[str], str]]:
    text = (PACKAGE.parent / "celeryconfig.py").read_text(encoding="utf-8")
    for names, meaning in re.findall(r"^([A-Z_]+(?:, [A-Z_]+)*) {2,}(\S.*)$", text, re.MULTILINE):
        yield VARIABLE.findall(names), f"{meaning[:1].upper()}{meaning[1:]}."


def _of_constants(*paths: Path) -> Iterator[tuple[list[str], str]]:
    """Yield variables with the comment above the constants that have their names; it may be that of several lines."""
    for path in paths or sorted(PACKAGE.rglob("*.py")):
        lines, said = path.read_text(encoding="utf-8").splitlines(), ""
        for number, line in enumerate(lines, 1):
            is_constant = re.match(r"[A-Z_, ]+ = \"", line)
            said = " ".join(_comment(lines, number)) or said if is_constant else ""
            if said:
                text = said.removeprefix("environment variable with the ")
                yield VARIABLE.findall(line), f"{text[:1].upper()}{text[1:]}."


def _of_docstrings() -> Iterator[tuple[list[str], str]]:
    """Yield variables with the sentences about them in docstrings."""
    for path in sorted(PACKAGE.rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        for node in ast.walk(ast.parse(text)) if VARIABLE.search(text) else ():
            if isinstance(node, (ast.FunctionDef, ast.ClassDef, ast.Module)):
                for sentence in re.split(r"(?<=\.)\s+(?=[A-Z`])", ast.get_docstring(node) or ""):
                    said = re.sub(r"^Return (the )?", "", sentence)
                    yield VARIABLE.findall(sentence), f"{said[:1].upper()}{said[1:]}"


def _of_help() -> Iterator[tuple[list[str], str]]:
    """Yield variables that the help of an option names in its text."""
    for name, command in _commands(group):
        for option in command.params:
            text = getattr(option, "help", None) or ""
            yield VARIABLE.findall(text), f"See the option `{option.opts[0]}` of `{name}`."
