"""Reading of files within limits, atomic replacement of a file, the folders of studies and trials, and class specs.

In each of FOLDERS below the working directory, a study has a folder whose name is its key. Keys are unique among all
stores.

A class spec is a TOML file that describes compute classes whose workers are started on demand.

A trial leaves files in a folder below the folder of checkpoints. A set of trials whose folders are not needed is a
bytes object: bit N, counted from the lowest bit of the first byte, stands for trial N. The functions for these folders
follow no links, and neither read nor delete anything outside of the folder of checkpoints.
"""

from __future__ import annotations

import codecs
import csv
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
import sys
import time
import uuid
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path
from typing import IO, Annotated, TypeVar

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, one_line, plain, short
from shadho_celery.core.hardware import check_class_name
from shadho_celery.core.trial import Bytes, Price
from shadho_celery.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: maximum number of bytes of a file; of bytes of a table; of columns of a table; of levels of nested values
MAX_BYTES, MAX_TABLE, MAX_COLUMNS, MAX_NESTED = 1_000_000, 100_000_000, 10_000, 30

#: matches a TOML key with more than MAX_NESTED parts, because tomllib takes quadratic time for it
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MAX_NESTED}}}")

#: suffix of the name of a temporary file that is being written
PART = ".part"


def read_bytes(path: Path, name: str, remedy: str = "", *, most: int = MAX_BYTES, is_secret: bool = False) -> bytes:
    """Return the content of a file, without the byte order mark that some editors write at its start.

    Raises UsageError if the file cannot be read, if it has more than `most` bytes, or if it is a secret that other
    users can read. A group other than root's may read a secret that belongs to root, because only root can give it to
    the group; Kubernetes does so. `name` is the name of the file in the message.
    """
    try:
        # Without O_NONBLOCK, the opening of a pipe would wait for a writer. If there is a writer, the read waits for
        # its text.
        with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            data, found = file.read(most + 1), os.fstat(file.fileno())
    except (OSError, ValueError) as error:
        raise _unreadable(name, getattr(error, "strerror", None) or one_line(error), remedy) from None
    closed = 0o037 if found.st_uid == 0 and found.st_gid != 0 else 0o077
    if is_secret and found.st_mode & closed:
        raise UsageError(f"other users can read {name}; run chmod 600 {path}")
    if stat.S_ISFIFO(found.st_mode) and not data:
        raise _unreadable(name, "it is a pipe to which no process writes", remedy)
    if len(data) > most:
        raise _unreadable(name, f"it has more than {most:,} bytes", remedy)
    return data.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path, name: str, remedy: str = "", *, most: int = MAX_BYTES, is_secret: bool = False) -> str:
    """Return the text in a file. Raises UsageError as `read_bytes` does, and if it is not text in UTF-8."""
    data = read_bytes(path, name, remedy, most=most, is_secret=is_secret)
    with suppress(UnicodeDecodeError):
        text = data.decode()
        # UTF-16 may be valid UTF-8, but with a NUL beside each letter.
        if "\0" not in text:
            return text
    raise _unreadable(name, "it is not text in UTF-8", remedy)


def read_toml(path: Path, name: str, parse: Callable[[dict[str, object]], T], remedy: str = "") -> T:
    """Read a TOML file and return the result of `parse` for its content.

    Raises UsageError if the file is not TOML, if a key has more than MAX_NESTED parts, or if `parse` raises UsageError.
    The message begins with `name`.
    """
    return as_toml(read_text(path, name, remedy), name, parse)


def as_toml(text: str, name: str, parse: Callable[[dict[str, object]], T]) -> T:
    """Return the result of `parse` for the content of a TOML text. Raises UsageError as `read_toml` does."""
    try:
        if _DEEP.search(text):
            raise UsageError(f"a key has more than {MAX_NESTED} parts")
        return parse(tomllib.loads(text))
    except (
        ValueError,
        RecursionError,
    ) as error:  # ValueError also for numbers with too many digits, RecursionError for deeply nested lists
        raise UsageError(f"{name} is not TOML: {short(error)}") from None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def read_table(path: Path, name: str, remedy: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file, and for each row its cells by column. A short row lacks the last
    columns.

    Raises UsageError as `read_text` does, and if the file is not CSV.
    """
    text = io.StringIO(read_text(path, name, remedy, most=MAX_TABLE), newline="")
    try:
        rows = filter(None, csv.reader(text, strict=True))
        names = next(rows, [])
        if len(names) > MAX_COLUMNS:
            raise csv.Error(f"more than {MAX_COLUMNS:,} columns")
        return names, [dict(zip(names, row, strict=False)) for row in rows]
    except csv.Error as error:
        raise UsageError(f"{name} is not a CSV file ({one_line(error)}); {remedy}") from None


def _unreadable(name: str, reason: str, remedy: str) -> UsageError:
    return UsageError(f"{name} cannot be read: {reason}{remedy and '; '}{remedy}")


@contextmanager
def replacing(target: Path, mode: int | None = None) -> Iterator[IO[bytes]]:
    """Yield a temporary file that replaces the file `target` at the end of the block.

    An existing `target` is unchanged until then, and after an error, so a full disk or a killed process does not
    destroy it. `mode` are the permissions of the new file, by default those of the existing file, or the usual ones. If
    `target` is a link, the file to which it leads is replaced. A device or a pipe cannot be replaced, so it is written
    to. Raises OSError.
    """
    target = target.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    if mode is None and target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
    # The temporary file is in the same folder, because a rename is atomic only within a file system. Its name is cut,
    # because a name has at most 255 bytes.
    part = target.with_name(f".{target.name[:50]}.{secrets.token_hex(8)}{PART}")
    descriptor = os.open(part, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o666 if mode is None else 0o600)
    try:
        with os.fdopen(descriptor, "wb") as file:
            yield file
        if mode is not None:
            part.chmod(mode)
        part.replace(target)
    finally:
        part.unlink(missing_ok=True)


#: folder of the checkpoints and logs of trials
CHECKPOINTS = Path(".shadho/checkpoints")
#: file in the folder of checkpoints with a token, by which machines recognise that they share the folder. The other
#: entries of the folder are keys of studies
STORAGE_TOKEN = ".storage"
#: folder of code that studies have shipped to a worker
SHIPPED_CODE = Path(".shadho/code")
#: folder of the TOML files that this package writes to describe studies of a command without a study file
COMMANDS = Path(".shadho/commands")
#: folder of the TOML files that describe sweeps of Hydra
SWEEPS = Path(".shadho/sweeps")
#: folder of the files of embedded servers and workers
EMBEDDED = Path(".shadho/embedded")
#: folder of the files that the processes of trackers keep locked while they run
TRACKED = Path(".shadho/trackers")
#: all folders in which studies have a folder of their own
FOLDERS = (CHECKPOINTS, SHIPPED_CODE, EMBEDDED, TRACKED)

#: name of the file that an embedded supervisor keeps locked while it runs
LOCK = "lock"
#: seconds to wait for this lock; a supervisor usually ends within three seconds after its scheduler
LOCK_SECONDS = 15.0


def new_key() -> str:
    """Return the key of a new study: 16 random hexadecimal digits."""
    return uuid.uuid4().hex[:16]


def below(root: Path, *parts: str) -> Path:
    """Return the path of `parts` below the folder `root`. The parts may come from a stranger's data.

    Raises UsageError if the path leads out of `root`, because of ``..`` or a link.
    """
    path = root.joinpath(*parts)
    top = os.path.realpath(root)
    try:
        real = os.path.realpath(path)
        is_outside = "\0" in str(path) or os.path.commonpath([top, real]) != top or real == top
    except ValueError:
        # The path has an unpaired surrogate, or NUL, which some versions of Python refuse.
        is_outside = True
    if is_outside:
        raise UsageError(f"{str(path)!r} leads out of {root}; remove the link there, or do not use data of strangers")
    return path


@lru_cache(maxsize=1000)
def study_folder(root: Path, study: str) -> Path:
    """Return the folder of a study's checkpoints and logs below `root`. Raises UsageError as `below` does.

    The result is cached, because a worker needs it several times per trial, and a check takes as long as all other work
    on the message of a trial.
    """
    return below(root, study, "logs").parent


def is_locked(path: Path, seconds: float = 0.0, *, unknown: bool = False) -> bool:
    """Return whether a live process still holds the lock of a file after `seconds`.

    The call returns as soon as the lock is free. It returns `unknown` if this cannot be checked.
    """
    deadline = time.monotonic() + seconds
    while _is_locked(path, unknown=unknown):
        if time.monotonic() >= deadline:
            return True
        time.sleep(0.02)
    return False


def _is_locked(path: Path, *, unknown: bool) -> bool:
    try:
        # Links are not followed, because they may lead anywhere. O_NONBLOCK is for pipes, whose opening would block.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
    except OSError:
        return unknown
    try:
        # Shared, because on NFS LOCK_EX needs write access.
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return unknown
    finally:
        os.close(descriptor)
    return False


def holds_files(folder: Path) -> bool:
    """Return whether there is a regular file in a folder or below it; False if the folder is missing or unreadable."""
    return any(Path(top, name).is_file() for top, _, names in os.walk(folder) for name in names)


#: maximum number of classes in a file; maximum number of workers, and of slots, of a class
MAX_CLASSES, MAX_WORKERS = 100, 10_000

_FORM = "write [classes.gpu_large] above slots = 1, max_workers = 4, startup_seconds = 120 and the like"

F = TypeVar("F", bound="ClassFacts")
_Count = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


#: seconds to wait for a started worker to announce itself, in addition to twice the start-up seconds of its class
_COME_SECONDS = 60.0


class ClassFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the workers of a compute class, known before any worker is live."""

    #: number of slots of one worker
    slots: _Count = 1
    #: GiB of RAM of one worker; 0 if it is not known
    memory_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    #: money that a slot costs per hour; None if it is not known
    price: Price | None = None
    #: seconds from the start of a worker until it takes trials
    startup_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class ClassSpec(ClassFacts, frozen=True, kw_only=True):
    """A compute class whose workers are started on demand."""

    #: maximum number of workers at a time
    max_workers: _Count = MAX_WORKERS

    @property
    def most(self) -> int:
        """Maximum number of slots of the class at a time."""
        return min(self.max_workers, MAX_WORKERS // self.slots) * self.slots

    @property
    def come_seconds(self) -> float:
        """Seconds after which a worker that was started, but has not announced itself, is no longer expected."""
        return 2 * self.startup_seconds + _COME_SECONDS


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a class spec, before its tables are checked."""

    classes: Annotated[dict[str, object], Meta(min_length=1, max_length=MAX_CLASSES)]


def read_class_spec(path: Path) -> dict[str, ClassSpec]:
    """Return the classes in a TOML file, in the order of the file. Raises UsageError with the file, the key and the
    remedy.
    """
    return read_classes(path, ClassSpec)


def read_classes(path: Path, kind: type[F]) -> dict[str, F]:
    """Return the classes in a TOML file as records of `kind`. Raises UsageError as `read_class_spec` does."""
    return read_toml(path, f"the class spec {path}", lambda content: parse(content, kind))


def parse(content: Mapping[str, object], kind: type[F], form: str = _FORM) -> dict[str, F]:
    """Return the classes in the content of a file as records of `kind`. Raises UsageError with the key of an invalid
    value.
    """
    found = {}
    for name, table in as_record(plain(content), _File, form=form).classes.items():
        check_class_name(name, "classes")
        found[name] = as_record(table, kind, f"classes.{short(name, 60)[1:-1]}", form)
    return found


#: maximum bytes of a file that a worker sends in one answer, and that it digests for one answer
MAX_PIECE, MAX_DIGESTED = 2**20, 2**26

#: maximum number of files of a folder that is fetched, so that their list fits in one answer
MAX_FILES = 1000

#: maximum bytes of a path; a longer one cannot be opened
MAX_PATH = 4096


#: matches the name of a trial's folder of checkpoints, and that of the folder of one of its attempts
_NAME = re.compile(r"(0|[1-9][0-9]{0,14})(\.attempt-[0-9]+\.[0-9]+)?")


class LeftFile(Struct, frozen=True):
    """A file in the folder of a trial."""

    #: path below the folder, which need not be text
    path: Annotated[bytes, Meta(min_length=1, max_length=MAX_PATH)]
    size: Bytes


def attempt_folder(checkpoints: str | Path, trial: int, attempt: int) -> Path:
    """Return the folder of an attempt of a command, which is beside the folder of the trial's checkpoints."""
    folder = Path(checkpoints).absolute()
    return folder.with_name(f"{folder.name}.attempt-{trial}.{attempt}")


def files_in(folder: Path) -> Iterator[LeftFile]:
    """Yield the regular files in a folder and below it. Links are left out, and a missing folder has no files."""
    for here, _, names in os.walk(folder):
        for path in [Path(here, name) for name in names]:
            with suppress(OSError):
                found = path.lstat()
                if stat.S_ISREG(found.st_mode):
                    yield LeftFile(os.fsencode(path.relative_to(folder)), found.st_size)


def read_part(root: Path, folder: str, path: bytes, start: int, size: int) -> bytes:
    """Return `size` bytes of a file from the position `start`, or fewer at its end.

    The file is at `path` below `folder`, which is below `root`. Raises UsageError if `path` leads out of `folder`, or
    `folder` out of `root`. Raises OSError if the file is not a regular file or cannot be read.
    """
    file_path = below(below(root, folder), os.fsdecode(path))
    # O_NONBLOCK is for named pipes, whose opening would block.
    with os.fdopen(os.open(file_path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError("it is no regular file")
        file.seek(start)
        return file.read(size)


def sweep(
    root: Path, study: str, unneeded: bytes | None, in_use: Collection[int] = (), *, is_sure: bool = True
) -> tuple[int, int]:
    """Delete the folders of the `unneeded` trials of a study, except trials `in_use`. Return their number and bytes.

    If `unneeded` is None, the folder of the study is deleted, unless a trial is `in_use`. Unless `is_sure`, nothing is
    deleted, and the folders are only counted. Raises UsageError if the study's folder leads out of `root`.
    """
    folder = below(root, study)
    found = [] if in_use else [folder]
    if unneeded is not None:
        numbers = {each: _number_of(each) for each in (folder.iterdir() if folder.is_dir() else ())}
        found = [
            each
            for each, n in numbers.items()
            if n not in in_use and n < 8 * len(unneeded) and unneeded[n // 8] >> n % 8 & 1
        ]
    found = [each for each in found if each.is_dir() and not (each.is_symlink() or folder.is_symlink())]
    sizes = {each: sum(file.size for file in files_in(each)) for each in found}
    for each in found if is_sure else ():
        shutil.rmtree(each, ignore_errors=True)
    # Folders that belong to another user may remain. They are not counted.
    done = [size for each, size in sizes.items() if not (is_sure and each.exists())]
    return len(done), sum(done)


def _number_of(folder: Path) -> int:
    """Return the number of the trial in the name of a folder; for another name, a number that no trial has."""
    return int(found[1]) if (found := _NAME.fullmatch(folder.name)) else sys.maxsize
