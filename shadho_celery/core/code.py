"""Version of a study's code, which must be the same in the scheduler and in all processes that run its trials."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import one_line, resolve

#: digest of code: twelve hexadecimal digits; "" if there is none
Digest = Annotated[str, Meta(pattern=r"^([0-9a-f]{12})?\Z")]

#: SHA-256 digest: 64 hexadecimal digits
FullDigest = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]

#: relative path of a file that cannot lead out of its folder
SourcePath = Annotated[str, Meta(pattern=r"^(\.?[\w-][\w.-]*/)*[\w-][\w.-]*\Z", max_length=1000)]

#: maximum total bytes of the sources of a study that are shipped
MAX_SOURCES = 1_000_000

#: maximum number of characters of the reason why code cannot be imported
MAX_PROBLEM = 500


def digest_of(content: bytes) -> str:
    """Return the BLAKE2b digest of `content`: 6 bytes as twelve hexadecimal digits."""
    return hashlib.blake2b(content, digest_size=6).hexdigest()


class CodeVersion(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Version of a study's code, as one process has imported it."""

    #: digest of sources and space together; "" if it is not known
    digest: Digest = ""
    #: by path below `root`: digest of a source; "" for a file that is missing or cannot be read
    files: dict[str, Digest] = {}
    #: version of an objective that is sent by value (`function_version`); "" for that of a study file
    function: Digest = ""
    #: digest of the description of the compiled space
    space: Digest = ""
    #: folder of the sources on the machine of the process
    root: str = ""
    #: reason why the code cannot be imported; "" if it can
    problem: Annotated[str, Meta(max_length=MAX_PROBLEM)] = ""
    #: True if the sources are shipped to the workers that accept them
    is_shipped: bool = False

    def with_space(self, description: Mapping[str, str]) -> CodeVersion:
        """Return this version with the digest of the space, and the digest of sources and space together.

        `description` is `Space.describe()`. A function that is sent by value brings its space with it, so the digest of
        the space is not part of the second digest. If it uses no modules of the user, its own version is that digest.
        """
        space = digest_of(_as_json(description))
        if self.function:
            digest = digest_of(_as_json([self.files, self.function])) if self.files else self.function
            return replace(self, space=space, digest=digest)
        return replace(self, space=space, digest=digest_of(_as_json([self.files, space])))

    def with_problem(self, error: object) -> CodeVersion:
        """Return this version without digests, and with the `problem` that `error` has prevented its import."""
        text = one_line(error, MAX_PROBLEM).encode("utf-8", "replace").decode()
        return replace(self, digest="", space="", problem=text or type(error).__name__)

    def is_usable(self, digest: str) -> bool:
        """Return whether trials of the code with `digest` may be sent to a process with this version.

        If one of the digests is not known, this is True, because the process itself refuses trials of code that it does
        not have.
        """
        return not digest or (not self.problem and self.digest in ("", digest))

    def difference(self, ours: CodeVersion) -> str:
        """Return a text that says how this version, of another process, differs from `ours`."""
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

    #: digest of the `CodeVersion` of these sources
    code: Digest
    #: content of each file by its path
    files: dict[SourcePath, bytes]
    #: digest of each input file of a command by its path; the contents of these files are sent separately
    inputs: dict[SourcePath, FullDigest] = {}

    def __post_init__(self) -> None:
        if (size := sum(map(len, self.files.values()))) > MAX_SOURCES:
            raise ValueError(f"its sources have {size:,} bytes, and at most {MAX_SOURCES:,} are shipped")


def _as_json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


# Types are resolved here, because several threads of a worker or a scheduler decode these records.
resolve(CodeVersion, Sources)
