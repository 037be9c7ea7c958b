"""Import and check of study files: modules with SPACE, `objective`, and optionally STUDY, `on_trial` and `on_end`.

Some functions read a study file only as text, without importing it. `refuse_nested` raises an error if a study is
started within a trial or an import. A study may also be a file of another kind (`Form`), which is
recognised by its suffix. The study's name is then the file's path relative to the working directory.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import importlib.util
import os
import re
import sys
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib.machinery import ModuleSpec, PathFinder
from itertools import islice
from pathlib import Path, PurePosixPath
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from msgspec.structs import replace

from shadho_celery.core.checks import line_of, one_line, short, similar
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.libraries import hides, installed_file, is_installed, library_named
from shadho_celery.core.names import BY_VALUE, FORMS, named
from shadho_celery.core.settings import OF_COMMANDS, SETTINGS, read_settings
from shadho_celery.core.system import overridden
from shadho_celery.core.trial import Params
from shadho_celery.errors import NestedStart, UsageError
from shadho_celery.objective import sources
from shadho_celery.objective.call import check_objective

if TYPE_CHECKING:
    from shadho_celery.space.space import Space

#: environment variable that is set, also for child processes, while a study file is imported or a trial runs; its value
#: says which
WITHIN = "SHADHO_WITHIN"
#: the value in the process of a slot
IN_A_TRIAL = "a trial"
#: matches the source of a script that is not meant as a study
_SCRIPT = re.compile(rb"(?is)(?!.*(space|objective|study|import +\*)).*(argparse|sys\.argv|__main__)")
#: maximum number of files among which a module of a similar name is looked for
MOST_FILES = 1000


@dataclass(frozen=True, kw_only=True)
class StudyFile:
    """What a study file defines, and the version of its code."""

    module: str
    space: Any
    objective: Any
    #: function that is called in the scheduler's process after each trial; None if the file defines none
    on_trial: Callable[..., Any] | None = None
    #: function that is called in this process after each run; None if the file defines none
    on_end: Callable[..., Any] | None = None
    #: settings in STUDY, which command-line options override
    stated: Mapping[str, Any] = field(default_factory=dict)
    #: version of its sources, without the space
    code: CodeVersion = field(default_factory=CodeVersion)
    #: called with the compiled space, returns the function that makes the objective's values from a trial's params;
    #: None for `Space.evaluate`
    values: Callable[[Space], Callable[[Params], Any]] | None = None
    #: True if each trial reads the study's files again, so that an edit is another version at once
    reads_disk: bool = False
    #: content of files that are shipped to workers together with the sources, by path
    data: Mapping[str, bytes] = field(default_factory=dict)

    @property
    def recorded_module(self) -> str:
        """Module in the study's record: "" for a function that is sent by value, as for one that is not sent."""
        return "" if self.module.endswith(BY_VALUE) else self.module

    def runnable(self, space: Space) -> tuple[Callable[..., Any], Callable[[Params], Any]]:
        """Return what runs as a trial, and the function that makes its argument from a trial's params."""
        if self.space is None:
            # Imported here, because few objectives ask for their labels.
            from shadho_celery.objective.suggest import Suggesting

            return Suggesting(self.objective), dict
        return self.objective, space.evaluate if self.values is None else self.values(space)


@dataclass(frozen=True, kw_only=True)
class ImportedFile:
    """A user's module that was imported, and the version of its code."""

    module: str
    #: what it defines, by name
    names: Mapping[str, Any]
    #: settings in STUDY
    stated: Mapping[str, Any]
    code: CodeVersion


class Form(Protocol):
    """Reads studies that are not Python modules but files of another kind. `name` is what `module_name` returns."""

    def load(self, name: str) -> StudyFile:
        """Return the study. If it is not valid, raises UsageError with cause and remedy."""

    def settings(self, name: str) -> dict[str, object] | None:
        """Return the study's settings without running the user's code; None if its file cannot be found."""

    def version(self, name: str) -> CodeVersion:
        """Return the version of the study's code, without its space. The study need not be valid."""


def form_of(name: str) -> Form | None:
    """Return the form for the suffix of the study's name; None if the study is a module."""
    form: Form | None = named(FORMS[suffix])() if (suffix := PurePosixPath(name).suffix) in FORMS else None
    return form


def file_of(name: str) -> Path | None:
    """Return the path of a study that is not a module: in the folder of shipped code, else in the working directory."""
    folders = dict.fromkeys([*map(Path, sys.path[:1]), Path.cwd()])
    return next((path for folder in folders if (path := folder / name).is_file()), None)


def path_of(name: str) -> Path:
    """Return the absolute path as `file_of` does. Raises UsageError, with a similar name, if there is no file."""
    if (found := file_of(name)) is None:
        known = [str(each) for each in islice(Path(name).parent.glob(f"*{Path(name).suffix}"), MOST_FILES)]
        raise UsageError(f"there is no file {name} here; {similar(name, known)}run from the folder that holds it")
    return found.absolute()


def load(module: str) -> StudyFile:
    """Import a study file and check it. If it is not valid, raises UsageError with cause and remedy."""
    if form := form_of(name := module_name(module)):
        return form.load(name)
    script = f"shadho-celery run -- python {name.replace('.', '/')}.py --lr {{lr:log:1e-4:1e-1}}"
    remedy = f"see the README's first study, or run a script as it is: {script}"
    found = import_file(module, ("SPACE", "objective"), "study file", remedy)
    file = StudyFile(
        module=found.module,
        space=found.names["SPACE"],
        objective=found.names.get("objective"),
        on_trial=found.names.get("on_trial"),
        on_end=found.names.get("on_end"),
        stated=found.stated,
        code=found.code,
    )
    if found.stated.get("command") is not None:
        return with_command(file)
    check_objective(file.objective, f"objective of {found.module}")
    return file


def with_command(file: StudyFile) -> StudyFile:
    """Return a study with the command of its settings as its objective. Raises UsageError if it is not valid."""
    # Imported late, because most studies have a function.
    from shadho_celery.objective.command import command_of, files_of

    if file.objective is not None:
        raise UsageError(f'{file.module} has both objective and STUDY["command"]; leave out one of them')
    try:
        command = command_of(file.stated, Path(file.code.root))
        command = dataclasses.replace(command, files=files_of(command))
        code = replace(file.code, files={**file.code.files, **command.files})
    except (UsageError, OSError) as error:
        raise UsageError(f"{file.module}: {one_line(error, 1000)}") from None
    return dataclasses.replace(file, objective=command, values=command.values, code=code, reads_disk=True)


def import_file(module: str, needed: Sequence[str], kind: str, remedy: str) -> ImportedFile:
    """Import a user's module that must define the `needed` names. Raises UsageError if it fails or lacks one of them.

    The error calls the module a `kind`, and says `remedy` after a missing name.
    """
    name = module_name(module)
    _refuse_no_module(name)
    refuse_libraries([name])
    spec = _found(name)
    if spec is None:
        raise no_module(name)
    # Read before the import, which then uses these sources.
    code = _read(name, spec)
    lacks = f"{name} is not a {kind}: it lacks"
    if "SPACE" in needed and any(code.files.values()) and _SCRIPT.match(Path(str(spec.origin)).read_bytes()):
        # It is not imported, because it may be a script that runs for hours.
        raise UsageError(f"{lacks} {' and '.join(needed)}; {remedy}")
    if edited := sources.edited_since_import(code):
        # Its workers would have other code than this process, which takes SPACE from what it has imported.
        raise UsageError(
            f"{edited} was edited after this Python imported it; restart Python (in a notebook, its kernel)"
        )
    here = Path.cwd()
    try:
        with within(f"the import of {name}"):
            imported = importlib.import_module(name)
    except (NestedStart, KeyboardInterrupt):
        raise
    except ImportError as error:
        line = line_of(error, str(spec.origin))
        raise UsageError(f"{name} cannot be imported: {error}{line}; install what it needs") from error
    except BaseException as error:
        line, hint = line_of(error, str(spec.origin)), ""
        if isinstance(error, AttributeError) and isinstance(error.obj, ModuleType):
            hint = similar(error.name, vars(error.obj)).rstrip()
        reason = f"{type(error).__name__}: {short(error, 1000)}{line}"
        raise UsageError(f"{name} cannot be imported: {'; '.join(filter(None, (reason, hint)))}") from error
    finally:
        # The file may have changed the working directory, but store and state are in that of the command.
        os.chdir(here)
    # hasattr is not used, because a module's own __getattr__ may fail.
    names = vars(imported)
    stated = names.get("STUDY", {})
    instead = {"objective"} if isinstance(stated, Mapping) and stated.get("command") is not None else ()
    missing = [part for part in needed if part not in names and part not in instead]
    if missing:
        hint = "".join(similar(part, names) for part in missing)
        raise UsageError(f"{lacks} {' and '.join(missing)}; {hint}{remedy}")
    if not any(code.files.values()):
        raise UsageError(
            f"the source of {name} cannot be read, because {spec.origin} is not a Python file; workers must compare it"
        )
    _refuse_twice(Path(str(spec.origin)))
    return ImportedFile(module=name, names=names, stated=checked(f"STUDY of {name}", stated), code=code)


def check_modules(names: Iterable[str]) -> None:
    """Raise UsageError for a study that does not exist. Nothing is imported; a worker reports an import that fails."""
    for name in map(module_name, names):
        if form_of(name):
            path_of(name)
            continue
        _refuse_no_module(name)
        if not _exists(name):
            raise no_module(name)


def _exists(name: str) -> bool:
    """Return whether the file of a module exists. Unlike `_found`, this does not import its parent packages."""
    package, *parts = name.split(".")
    spec = _spec(package)
    for part in parts:
        if not part or spec is None or spec.submodule_search_locations is None:
            return False
        package = f"{package}.{part}"
        spec = PathFinder.find_spec(package, spec.submodule_search_locations)
    return spec is not None


def no_module(name: str) -> UsageError:
    """Return the error for a module that does not exist. It suggests a module of a similar name in the same folder."""
    package = name.rpartition(".")[0]
    files = Path.cwd().joinpath(*package.split(".")).glob("*.py")
    known = {f"{package}.{file.stem}".lstrip(".") for file in islice(files, MOST_FILES)} - {name}
    return UsageError(
        f"there is no module {name} here; {similar(name, sorted(known))}run from the folder that holds it, or set "
        "PYTHONPATH"
    )


@contextmanager
def within(what: str) -> Iterator[None]:
    """Set the variable WITHIN to `what` in the block, so that `refuse_nested` raises there and in child processes."""
    with overridden({WITHIN: what}):
        yield


def refuse_nested(module: str = "") -> None:
    """Raise NestedStart within a trial, during the import of a study file, and during the import of `module`.

    Called before a worker or a study on workers is started. Started there, each of its trials would start another one.
    """
    what = os.environ.get(WITHIN, f"the import of {module}" if is_starting(module) else "")
    if what.startswith("the import"):
        raise NestedStart(
            f"a study on workers is started during {what}, and every worker imports that file; put the call under "
            'if __name__ == "__main__":'
        )
    if what:
        raise NestedStart(
            f"a study on workers is started within {what}, where each trial would start its own workers; start it "
            "outside, or use no workers for a search within a trial"
        )


def is_starting(module: str) -> bool:
    """Return whether the import of `module` has started but not ended in this process."""
    return bool(getattr(getattr(sys.modules.get(module), "__spec__", None), "_initializing", False))


def is_program(module: str) -> bool:
    """Return whether `module` is the file of the running program, or is being imported."""
    if form_of(module):
        return False
    program, spec = getattr(sys.modules.get("__main__"), "__file__", None), _found(module_name(module))
    is_file = program is not None and spec is not None and str(Path(program).absolute()) == spec.origin
    return is_file or is_starting(module)


def read_sources(module: str) -> CodeVersion:
    """Return the version of a study's sources, without its space. The study need not be importable."""
    if form := form_of(module):
        return form.version(module)
    spec = _found(module)
    return sources.absent(module) if spec is None else _read(module, spec)


def module_name(given: str) -> str:
    """Return the name of a study that is given by name or by path, such as ``tasks.svm`` for ``tasks/svm.py``.

    The name of a study that is not a module is the path of its file.
    """
    if given.endswith((".py", "/", *FORMS)):
        if (place := Path(os.path.relpath(given))).parts[0] == os.pardir:
            raise UsageError(
                f"{short(given, 200)} is outside this folder, but studies are named by their path in it; "
                f"go to {place.parent} and give {place.name}"
            )
        if place.suffix in FORMS:
            return place.as_posix()
        given = ".".join(Path(os.path.relpath(given.removesuffix(".py"))).parts)
    return given.strip(".").removesuffix(".__init__")


def cores_per_trial(modules: Iterable[str]) -> int:
    """Return the largest STUDY["cores"] of `modules`, at least 1. The modules are read as text, not imported."""
    return max([1, *(value for value in _written(modules, "cores") if isinstance(value, int))])


def preloaded(modules: Iterable[str]) -> list[str]:
    """Return the installed libraries in STUDY["preload"] of `modules`. The modules are read as text, not imported."""
    lists = [value for value in _written(modules, "preload") if isinstance(value, (list, tuple))]
    names = dict.fromkeys(name for each in lists for name in each if isinstance(name, str))
    return [name for name in names if name.replace(".", "_").isidentifier() and _is_library(name)]


def _written(modules: Iterable[str], key: str) -> list[object]:
    """Return the values that `literal_settings` has for `key`, of all `modules` that have the key.

    A worker's main process does not import studies, because libraries such as torch need much memory and time.
    """
    return [stated[key] for stated in map(literal_settings, modules) if stated and key in stated]


def _is_library(name: str) -> bool:
    """Return whether a module is an installed library, or is built into Python."""
    top = _spec(name.partition(".")[0])
    return top is not None and top.origin is not None and (top.origin == "built-in" or is_installed(top.origin))


def literal_settings(module: str) -> dict[str, object] | None:
    """Return the settings in STUDY whose values are literals. The study is read as text, not imported.

    Return None if the study file cannot be found.
    """
    if form := form_of(module):
        return form.settings(module)
    spec = _found(module)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return None
    pairs = [pair for pairs in _literal_studies(Path(spec.origin)) for pair in pairs]
    return {key: value for key, value in pairs if isinstance(key, str) and value is not None}


def _refuse_twice(path: Path) -> None:
    """Raise UsageError if STUDY has a key twice, because Python silently keeps the last value."""
    for pairs in _literal_studies(path):
        keys = [key for key, _ in pairs if isinstance(key, str)]
        if twice := [key for key, count in Counter(keys).items() if count > 1]:
            raise UsageError(f'STUDY["{one_line(twice[0], 60)}"] is given twice in {path.name}; give it once')


def _literal_studies(path: Path) -> Iterator[list[tuple[object, object]]]:
    """Yield the pairs of key and value of each dict that a file assigns to STUDY, read from its text.

    A key or value that is not a literal is replaced by None.
    """
    try:
        body = ast.parse(path.read_bytes()).body
    except (OSError, SyntaxError, ValueError):
        return
    for node in body:
        targets = node.targets if isinstance(node, ast.Assign) else [getattr(node, "target", None)]
        study = getattr(node, "value", None)
        if isinstance(study, ast.Dict) and any(isinstance(each, ast.Name) and each.id == "STUDY" for each in targets):
            yield [(_literal(key), _literal(value)) for key, value in zip(study.keys, study.values, strict=True)]


def _literal(node: ast.expr | None) -> object:
    try:
        return None if node is None else ast.literal_eval(node)
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        return None


def failed_sources(module: str, error: BaseException) -> CodeVersion:
    """Return the version of a study whose import has failed with `error`.

    If a module was not found, the version also has the file in which it was expected, with the digest "".
    """
    code = read_sources(module).with_problem(error)
    cause = error.__cause__
    if isinstance(cause, ModuleNotFoundError) and cause.name:
        code = replace(code, files={**code.files, **sources.absent(cause.name).files})
    return code


def _refuse_no_module(name: str) -> None:
    """Raise UsageError if `name` is not the name of a module, or is that of a notebook or of the running program."""
    if name == "__main__" or name.endswith(".ipynb"):
        raise UsageError(
            f"{name} is not a module that a worker could import; save SPACE and objective in their own file, such as "
            "my_study.py, and give that"
        )
    if bad := [part for part in name.split(".") if part and not part.isidentifier()]:
        because = "" if bad[0] == name else f", because of {short(bad[0], 60)!r}"
        raise UsageError(
            f"{short(name, 200)} is not a module's name{because}; rename the file so that it has only letters, digits "
            "and underscores, such as my_study.py"
        )


def refuse_libraries(modules: Iterable[str]) -> None:
    """Raise UsageError for a study with the name of a library, because Python may import the library in its place."""
    for name in modules:
        if form_of(name):
            continue
        top = name.partition(".")[0]
        if (library := library_named(top)) and (file := _own_file(name)) and not _is_copy(name, file):
            # The message names the file of the study, or for a study in a package the folder of the package.
            place = file if name == top else next(each for each in file.parents if each.name == top)
            raise UsageError(hides(place, library))


def _own_file(name: str) -> Path | None:
    """Return the file of a study: in the working directory, else the file that Python would import.

    Return None if there is no such file, or if it belongs to an installed library.
    """
    path = Path.cwd().joinpath(*name.split("."))
    files = [path.with_name(f"{path.name}.py"), path / "__init__.py"]
    if (spec := _found(name)) and spec.origin and spec.has_location:
        files.append(Path(spec.origin))
    return next((file for file in files if file.is_file() and not is_installed(file)), None)


def _is_copy(name: str, file: Path) -> bool:
    """Return whether the installed library `name` is the study itself, installed from the study's folder."""
    installed = installed_file(name)
    return bool(installed and ("." in name or installed.read_bytes() == file.read_bytes()))


def _found(name: str) -> ModuleSpec | None:
    # The package is searched first, because the search for a module in a missing package raises an error.
    return _spec(name) if _spec(name.partition(".")[0]) else None


def _read(name: str, spec: ModuleSpec) -> CodeVersion:
    """Return the version of a module that was found. A folder without ``__init__.py`` has no source of its own."""
    return sources.read(name, spec.origin) if spec.origin and spec.has_location else CodeVersion()


def _spec(name: str) -> ModuleSpec | None:
    here = str(Path.cwd())
    if here not in sys.path:
        sys.path.insert(0, here)
    # Python caches the names of the files in a folder, and would not find a new file.
    importlib.invalidate_caches()
    with suppress(ImportError, ValueError):
        return importlib.util.find_spec(name)
    return None


def checked(where: str, stated: object) -> dict[str, object]:
    """Return settings converted to their types. Raises UsageError, which names `where` they are and the invalid key."""
    if not isinstance(stated, Mapping):
        raise UsageError(f"{where} is not a dict")
    if isinstance(stated.get("classes"), (set, frozenset)):
        raise UsageError(f"{where}: classes: a set has no order; {SETTINGS['classes'].meaning}")
    try:
        settings = read_settings(stated)
    except UsageError as error:
        raise UsageError(f"{where}: {error}") from None
    if settings.command is None and (others := [key for key in OF_COMMANDS if getattr(settings, key)]):
        raise UsageError(f"{where}: {others[0]} is for a command; set command, or leave it out")
    if own := [library for library in settings.preload if not _is_library(library)]:
        raise UsageError(
            f"{where}: preload: {short(own[0], 60)} is not an installed library; name libraries that the study "
            "imports, not its own modules"
        )
    # `read_settings` has replaced `direction` by `objectives`.
    keys = ["objectives" if key == "direction" else key for key in stated]
    return {key: getattr(settings, key) for key in keys}
