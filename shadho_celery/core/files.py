"""Reading of the files that users name, within bounds; atomic replacement of a file."""

from __future__ import annotations

import codecs
import csv
import io
import os
import re
import secrets
import stat
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO, TypeVar

from shadho_celery.core.checks import one_line, short
from shadho_celery.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")

#: maximum bytes of a file, and of a table; columns of a table; levels of nested values
MAX_BYTES, MAX_TABLE, MAX_COLUMNS, MAX_NESTED = 1_000_000, 100_000_000, 10_000, 30

#: a TOML key of more parts than MAX_NESTED, for which tomllib takes quadratic time
_PART = r"""(?:[\w-]+|"[^"\n]*"|'[^'\n]*')"""
_DEEP = re.compile(rf"(?<![\w-]){_PART}(?:[ \t]*\.[ \t]*{_PART}){{{MAX_NESTED}}}")

#: suffix of the temporary name of a file that is being written
PART = ".part"


def read_bytes(path: Path, name: str, remedy: str = "", *, most: int = MAX_BYTES, is_secret: bool = False) -> bytes:
    """Return the content of a file, without the byte order mark with which some editors begin a text.

    Raises UsageError, which calls the file `name`, if it cannot be read, if it has more bytes than `most`, or if it is
    a secret that other users can read.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a writer. With a writer, its text is awaited.
        with open(path, "rb", opener=lambda file, flags: os.open(file, flags | os.O_NONBLOCK)) as file:
            os.set_blocking(file.fileno(), True)
            data, mode = file.read(most + 1), os.fstat(file.fileno()).st_mode
    except (OSError, ValueError) as error:
        raise _unreadable(name, getattr(error, "strerror", None) or one_line(error), remedy) from None
    if is_secret and mode & 0o077:
        raise UsageError(f"other users can read {name}; run chmod 600 {path}")
    if stat.S_ISFIFO(mode) and not data:
        raise _unreadable(name, "it is a pipe to which no process writes", remedy)
    if len(data) > most:
        raise _unreadable(name, f"it has more than {most:,} bytes", remedy)
    return data.removeprefix(codecs.BOM_UTF8)


def read_text(path: Path, name: str, remedy: str = "", *, most: int = MAX_BYTES, is_secret: bool = False) -> str:
    """Return the text in a file. Raises UsageError as `read_bytes` does, and if it is not text in UTF-8."""
    data = read_bytes(path, name, remedy, most=most, is_secret=is_secret)
    with suppress(UnicodeDecodeError):
        text = data.decode()
        # UTF-16 may be valid UTF-8 with a zero beside each letter.
        if "\0" not in text:
            return text
    raise _unreadable(name, "it is not text in UTF-8", remedy)


def read_toml(path: Path, name: str, parse: Callable[[dict[str, object]], T], remedy: str = "") -> T:
    """Return what `parse` returns for the content of a TOML file. Raises UsageError with `name`, also if `parse` does.

    A key has at most MAX_NESTED parts.
    """
    text = read_text(path, name, remedy)
    try:
        if _DEEP.search(text):
            raise UsageError(f"a key has more than {MAX_NESTED} parts")
        return parse(tomllib.loads(text))
    except (ValueError, RecursionError) as error:  # also numbers of too many digits, and lists in lists in lists
        raise UsageError(f"{name} is not TOML: {short(error)}") from None
    except UsageError as error:
        raise UsageError(f"{name}: {error}") from None


def read_table(path: Path, name: str, remedy: str) -> tuple[list[str], list[dict[str, str]]]:
    """Return the names of the columns of a CSV file, and for each row its cells by column. A short row lacks some.

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

    An existing `target` is unchanged until then, and after an error: a full disk or a killed process does not destroy
    it. `mode` are the permissions of the new file, by default those of the existing file, or of any new file. If
    `target` is a link, the file that it leads to is replaced. A device or a pipe cannot be replaced, so it is written
    to. Raises OSError.
    """
    target = target.resolve()
    if target.exists() and not target.is_file():
        with target.open("wb") as file:
            yield file
        return
    if mode is None and target.exists():
        mode = stat.S_IMODE(target.stat().st_mode)
    # In the same folder, because a rename is atomic only within a file system. A file name has at most 255 bytes.
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
