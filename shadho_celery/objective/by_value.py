"""Studies that are sent by value: function and space are pickled, with the objects of the program that they use.

The file begins with a header, which is read without running any code. Then come the pickles of the space and of the
function, and the large arrays that the function uses. Each trial unpickles the function and maps the arrays
copy-on-write, so that it may change its copy, and no other trial sees the change.

Only the processes of slots unpickle the file. The user's program has started their worker with the file, or the worker
accepts signed code.
"""

from __future__ import annotations

import fcntl
import io
import mmap
import os
import pickle
import re
import secrets
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path, PurePosixPath
from types import CodeType, FunctionType, ModuleType
from typing import Annotated, Any

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import listed, one_line, short
from shadho_celery.core.code import MAX_SOURCES, CodeVersion, Digest, digest_of
from shadho_celery.core.files import below, is_locked, replacing
from shadho_celery.errors import NestedStart, UsageError
from shadho_celery.objective import sources
from shadho_celery.objective.call import wants_context
from shadho_celery.objective.study_file import IN_A_TRIAL, WITHIN, StudyFile, file_of, path_of, within

#: files of the functions that embedded workers run
FUNCTIONS = Path(".shadho/functions")
#: number of times that the folder is made again if another program removes it before the file is in it
RETRIES = 100

#: arrays of at least this number of bytes are written outside of the pickle, and mapped by each trial
LARGE = 1_000_000

#: maximum bytes of the pickles for the workers of this machine, without large arrays; and for those of a fleet
MAX_HERE, MAX_SENT = 16_000_000, MAX_SOURCES

#: version of Python: a pickle has bytecode, which other minor versions cannot run
PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"

#: each part of a file begins at a multiple of this number of bytes, so that the processor's widest loads are aligned
_ALIGNED = 64

#: maximum bytes of a header
_MAX_HEADER = 1_000_000


class Header(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """First line of a file, in JSON."""

    #: version of the function, without the modules that it uses
    function: Digest
    #: modules that the function and the space name; libraries are included
    modules: list[str]
    #: version of Python (`PYTHON`)
    python: str
    #: bytes of each part: the pickle of the space, that of the function, and the arrays
    sizes: Annotated[list[Annotated[int, Meta(ge=0)]], Meta(min_length=2)]


class ByValue:
    """Form of a function that is sent by value. Its settings are arguments of the call that begins the study."""

    def load(self, name: str) -> StudyFile:
        """Unpickle the function in the process of a slot. Raises UsageError elsewhere."""
        if os.environ.get(WITHIN) != IN_A_TRIAL:
            raise UsageError(f"{name} is a function of a program, and only the program itself can run its study")
        header, (pickled_space, *_) = _opened(path := path_of(name))
        if header.python != PYTHON:
            raise UsageError(f"{name} needs Python {header.python}, and this worker has Python {PYTHON}")
        # Read the sources before the modules are imported, so that the imports use the same sources.
        code = self.version(name)
        try:
            with within("the import of the function's modules"):
                space = pickle.loads(pickled_space)
                takes_context = wants_context(_unpickled(path))
        except NestedStart:
            raise
        except Exception as error:
            reason = f"{type(error).__name__}: {short(error, 1000)}"
            remedy = "; install what it needs" if isinstance(error, ImportError) else ""
            raise UsageError(f"{name} cannot be loaded here: {reason}{remedy}") from error

        def objective(params: Any, context: Any) -> Any:
            # Each trial unpickles the function, so that it does not see what other trials have changed in the data.
            function = _unpickled(path)
            return function(params, context) if takes_context else function(params)

        return StudyFile(module=name, space=space, objective=objective, code=code)

    def settings(self, name: str) -> dict[str, object] | None:
        return None if file_of(name) is None else {}

    def version(self, name: str) -> CodeVersion:
        with suppress(UsageError):
            header, _ = _opened(path := path_of(name))
            root = path.parents[len(PurePosixPath(name).parts) - 1]
            return replace(sources.read_own(header.modules, root, are_imported=True), function=header.function)
        return CodeVersion()


def _opened(path: Path) -> tuple[Header, list[memoryview]]:
    """Return the header and the parts of the file of a function. A change of a part does not change the file.

    Raises UsageError if the file is not valid, or if another user could have written it.
    """
    try:
        with path.open("rb") as file:
            found = os.fstat(file.fileno())
            if found.st_uid != os.geteuid() or found.st_mode & 0o022:
                raise UsageError(f"{path} could have been written by another user, so it is not loaded")
            content = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
        end = content.find(b"\n", 0, _MAX_HEADER) + 1
        header = msgspec.json.decode(content[:end], type=Header)
    except (OSError, ValueError) as error:
        raise UsageError(f"{path} is not the file of a function: {short(error)}") from None
    parts = []
    for size in header.sizes:
        end += -end % _ALIGNED
        parts.append(memoryview(content)[end : end + size])
        end += size
    return header, parts


def _unpickled(path: Path) -> Callable[..., Any]:
    """Return the function in a file, with a copy of its data that no other trial uses."""
    _, (_, pickled, *arrays) = _opened(path)
    function: Callable[..., Any] = pickle.loads(pickled, buffers=arrays)
    return function


@contextmanager
def kept(objective: Callable[..., Any], space: object) -> Iterator[StudyFile]:
    """Write a function and its space to a file for the workers of this machine, and remove it after the block.

    The yielded study has the program's own objects. Raises UsageError for what cannot be pickled or written.
    """
    arrays: list[memoryview] = []
    header, pickles, code = _packed(objective, space, MAX_HERE, arrays)
    path = below(FUNCTIONS, f"{_name_of(objective)}_{secrets.token_hex(4)}.pickle")
    with ExitStack() as opened:
        opened.callback(_remove, path)
        try:
            # Other programs may remove these files, and the folder when it is empty, at any moment.
            with suppress(FileNotFoundError):
                for left in FUNCTIONS.glob("*.pickle*"):
                    # The program that has written this file was killed if the file is not locked. A program locks its
                    # file before it writes to it.
                    if left.stat().st_size and not is_locked(left, unknown=True):
                        left.unlink()
            with ExitStack() as writing:
                for retries in range(RETRIES, -1, -1):
                    try:
                        FUNCTIONS.mkdir(parents=True, exist_ok=True)
                        file = writing.enter_context(replacing(path, 0o600))
                        break
                    except (FileNotFoundError, FileExistsError):
                        if not retries:
                            raise
                # The lock lasts until this copy of the descriptor is closed, although `file` is closed before.
                opened.callback(os.close, lock := os.dup(file.fileno()))
                with suppress(OSError):
                    fcntl.flock(lock, fcntl.LOCK_EX)
                file.writelines(_parts(header, [*pickles, *arrays]))
        except OSError as error:
            raise UsageError(f"the function cannot be written to {FUNCTIONS}: {error.strerror}; make room") from None
        yield StudyFile(module=path.as_posix(), space=space, objective=objective, code=code)


def sent(objective: Callable[..., Any], space: object) -> StudyFile:
    """Return the study of a function that is sent with its space to the workers of a fleet.

    Raises UsageError for what cannot be pickled, or is too large to be sent.
    """
    header, pickles, code = _packed(objective, space, MAX_SENT, None)
    content = b"".join(_parts(header, pickles))
    # The name depends on the content, because a run that resumes the study may send other data.
    name = f"{_name_of(objective)}_{digest_of(content)}.pickle"
    return StudyFile(module=name, space=space, objective=objective, code=code, data={name: content})


def _packed(
    objective: Callable[..., Any], space: object, most: int, arrays: list[memoryview] | None
) -> tuple[Header, list[bytes], CodeVersion]:
    """Return header, pickles and version of a function and its space. Large data are added to `arrays`, if given.

    Raises UsageError for what cannot be pickled, and for pickles of more bytes than `most`.
    """
    modules: set[str] = set()
    try:
        pickles = [_pickled(space, None, modules), _pickled(objective, arrays, modules)]
    except Exception as error:
        parts = (("space", space), *sources.used(objective), ("function", objective))
        raise _refusal(parts, one_line(error, 300)) from None
    if sum(map(len, pickles)) > most:
        raise _too_large(objective, pickles, most, arrays)
    # Only workers import these modules, so the version is that of the files on the disk.
    code = sources.read_own(sorted(modules), Path.cwd(), are_imported=False)
    function = sources.function_version(objective)
    sizes = [len(each) for each in (*pickles, *(arrays or ()))]
    header = Header(function=function, modules=sorted(modules), python=PYTHON, sizes=sizes)
    return header, pickles, replace(code, function=function)


def _pickled(value: object, arrays: list[memoryview] | None, modules: set[str] | None = None) -> bytes:
    """Return the pickle of a value. Raises any exception if it cannot be pickled.

    The value's large data are added to `arrays`, and the modules that it names to `modules`, if these are given.
    """
    # Imported late, because most programs send nothing by value.
    import cloudpickle

    class Pickler(cloudpickle.Pickler):  # type: ignore[misc]
        def reducer_override(self, given: Any) -> Any:
            if modules is not None:
                modules.update(_modules_of(given))
            if isinstance(given, CodeType):
                # cloudpickle replaces the name of the file by this text, but tracebacks should name the user's file.
                make, parts = self.dispatch_table[CodeType](given)
                return make, tuple(given.co_filename if each == "<dynamic-code>" else each for each in parts)
            return _reduced(given) or super().reducer_override(given)

    def is_small(buffer: pickle.PickleBuffer) -> bool:
        if (data := buffer.raw()).nbytes < LARGE or arrays is None:
            return True
        arrays.append(data)
        return False

    file = io.BytesIO()
    Pickler(file, protocol=5, buffer_callback=is_small).dump(value)
    return file.getvalue()


def _reduced(value: Any) -> Any:
    """Return how an array or tensor is pickled; None for other values and for those that need nothing else."""
    if type(value).__module__ == "numpy" and getattr(value, "nbytes", 0) >= LARGE and not value.flags.forc:
        # numpy would write the data of an array that is not contiguous into the pickle.
        return value.copy().__reduce_ex__(5)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        if value.device.type != "cpu":
            raise UsageError(f"it is on {value.device}, whose memory other processes lack; send value.cpu()")
        if type(value) is torch.Tensor and not value.requires_grad and value.nbytes >= LARGE:
            # The data of a tensor stay in the pickle if numpy lacks its type.
            with suppress(TypeError, RuntimeError):
                return torch.from_numpy, (value.numpy(),)
    return None


def _modules_of(value: Any) -> Iterator[str]:
    """Yield the modules that a pickled value names, and those that a function of the program itself imports."""
    name = value.__name__ if isinstance(value, ModuleType) else getattr(value, "__module__", None)
    if name != "__main__" and isinstance(name, str):
        yield name
    elif isinstance(value, FunctionType):
        base = ""
        for each in sources.instructions(value.__code__):
            if each.opname == "IMPORT_NAME":
                base = str(each.argval)
                yield base
            elif each.opname == "IMPORT_FROM":
                # The imported name may be that of a module in the package `base`.
                yield f"{base}.{each.argval}"


def _refusal(parts: Iterable[tuple[str, object]], reason: str) -> UsageError:
    """Return the error for what cannot be pickled. It names the first of these parts that fails, or its attribute."""
    for where, value in parts:
        try:
            _pickled(value, [])
        except Exception as found:
            kind, remedy = type(value), "" if isinstance(found, UsageError) else "; create it within the function"
            reason = f"its {where} is a {kind.__module__}.{kind.__qualname__}: {one_line(found, 300)}{remedy}"
            own = {} if "." in where or isinstance(value, (type, ModuleType)) else getattr(value, "__dict__", {})
            return _refusal(((f"{where}.{name}", each) for name, each in own.items()), reason)
    return UsageError(f"the function cannot be sent to workers: {reason}")


def _too_large(
    objective: Callable[..., Any], pickles: Sequence[bytes], most: int, arrays: list[memoryview] | None
) -> UsageError:
    """Return the error for pickles that are too large, which names what is largest."""
    sizes = [(len(pickles[0]), "the space")]
    sizes += [(len(_pickled(each, None if arrays is None else [])), where) for where, each in sources.used(objective)]
    largest = [f"{where} {size / 1e6:.3g} MB" for size, where in sorted(sizes, reverse=True) if size > most / 100]
    who, rest = ("a fleet", "") if arrays is None else ("this machine", " beside large arrays")
    return UsageError(
        f"the function has {sum(map(len, pickles)) / 1e6:.3g} MB{rest}, and workers of {who} get at most "
        f"{most / 1e6:.3g} MB: {listed(largest, 3)}; let the function read it from a file"
    )


def _parts(header: Header, parts: Iterable[bytes | memoryview]) -> Iterator[bytes | memoryview]:
    """Yield the content of a file piece by piece."""
    for part in (msgspec.json.encode(header) + b"\n", *parts):
        yield part
        yield bytes(-len(part) % _ALIGNED)


def _name_of(objective: Callable[..., Any]) -> str:
    """Return the beginning of a file's name, by which a user recognises the function."""
    name = getattr(objective, "__name__", "")
    return name[:40] if re.fullmatch(r"[A-Za-z]\w*", name, re.ASCII) else "function"


def _remove(path: Path) -> None:
    """Remove a file, and the folders that were made for it if they are empty."""
    for remove in (path.unlink, FUNCTIONS.rmdir, FUNCTIONS.parent.rmdir):
        with suppress(OSError):
            remove()
