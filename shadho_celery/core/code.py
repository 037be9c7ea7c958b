"""Version of a study's code, which must be the same in the scheduler and in every process that runs its trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import one_line, resolve

#: digest of code: twelve hexadecimal digits, or "" for no digest
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{12})?\Z")]

#: relative path of a Python file, or of a function that is sent by value; its names cannot lead out of the folder
SourcePath = Annotated[str, Meta(pattern=r"^([^\W\d]\w*/)*[^\W\d]\w*\.(py|pickle)\Z", max_length=1000)]

#: maximum bytes of all sources of a study together, if they are shipped
MAX_SOURCES = 1_000_000

#: maximum characters of the reason why code cannot be imported
MAX_PROBLEM = 500


def digest_of(content: bytes) -> str:
    """Return the BLAKE2b digest of `content`: 6 bytes as twelve hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class CodeVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Version of a study's code, as one process has imported it."""

    #: digest of sources and space together; "" if it is not known
    digest: Digest = ""
    #: digest of each source by its path below `root`; "" for a file that is missing or cannot be read
    files: dict[str, Digest] = {}
    #: version of an objective that is sent by value (`function_version`); "" for that of a study file
    function: Digest = ""
    #: digest of the compiled space's description
    space: Digest = ""
    #: folder of the sources on that process's machine
    root: str = ""
    #: reason why the code cannot be imported; "" if it can
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM)] = ""
    #: True if the sources are shipped to the workers that accept them
    is_shipped: bool = False

    def with_space(self, description: Mapping[str, str]) -> CodeVersion:
        """Return the version with the digest of its space, and that of sources and space together.

        `description` is that of the compiled space, `Space.describe()`. A function that is sent by value brings its
        space with it. If it uses no modules of its own, its version is the one that it has in a program's process.
        """
        space = digest_of(_as_json(description))
        if self.function:
            digest = digest_of(_as_json([self.files, self.function])) if self.files else self.function
            return replace(self, space=space, digest=digest)
        return replace(self, space=space, digest=digest_of(_as_json([self.files, space])))

    def with_problem(self, error: object) -> CodeVersion:
        """Return the version of code that cannot be imported because of `error`."""
        text = one_line(error, MAX_PROBLEM).encode("utf-8", "replace").decode()
        return replace(self, digest="", space="", problem=text or type(error).__name__)

    def is_usable(self, digest: str) -> bool:
        """Return whether a process with this version may be given trials of the code with `digest`.

        Return True, too, if one of the two digests is unknown: the process itself refuses trials of code that it does
        not have.
        """
        return not digest or (not self.problem and self.digest in ("", digest))

    def difference(self, ours: CodeVersion) -> str:
        """Return a description of how this version, which is that of another process, differs from `ours`."""
        if self.problem:
            return self.problem
        versions = f"its code has version {self.digest} there and {ours.digest} here"
        names = [name for name in sorted({**ours.files, **self.files}) if self.files.get(name) != ours.files.get(name)]
        if not names:
            return (
                f"{versions}; its sources are the study's, but SPACE differs: a SPACE must not depend on the machine, "
                "on other files or on chance; a set has no order: it differs by process, use sorted(...)"
            )
        which = Path(self.root, names[0])
        differs = f"{which} differs" if len(names) == 1 else f"{which} and {len(names) - 1} more files differ"
        return f"{versions}; {differs}; copy the study's files there"


class Sources(Struct, frozen=True, kw_only=True):
    """Sources of a study that are shipped to the workers that accept code."""

    #: digest of their `CodeVersion`
    code: Digest
    #: content of each file, by its path
    files: dict[SourcePath, bytes]

    def __post_init__(self) -> None:
        if (size := sum(map(len, self.files.values()))) > MAX_SOURCES:
            raise ValueError(f"its sources have {size:,} bytes, and at most {MAX_SOURCES:,} are shipped")


def _as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


# Several threads decode these records: those of a worker's slots, and those of a scheduler.
resolve(CodeVersion, Sources)
