"""Access to a fleet whose only server is a Redis: its record, the text that carries it to another machine, its files.

The text is ``shadhoPROTOCOL.`` and, in base64, a checksum and the record as JSON. It contains the password of Redis and
the signing key, without encryption.
"""

from __future__ import annotations

import base64
import hashlib
import os
import re
import shlex
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Annotated

import msgspec
from msgspec import Meta, Struct

from shadho_celery.core.checks import encoded
from shadho_celery.core.files import read_text, replacing
from shadho_celery.errors import UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.broker import PROTOCOL
from shadho_celery.fleet.signing import KEY_FILE, MIN_BYTES

#: pattern of a host's name or address
HOST = r"(?a:[\w-]{1,63}(\.[\w-]{1,63}){0,30}|[0-9A-Fa-f:.]{0,40}:[0-9A-Fa-f:.]{0,40})"

#: pattern of the text of an `Access`
TEXT = re.compile(r"shadho([0-9]{1,6})\.([A-Za-z0-9_-]{1,4000})")

#: maximum characters of a line with such a text
MAX_TEXT = 5000

#: names of the files in the folder of a fleet: the signing key, and shell commands that set the environment variables
SIGNING_KEY, ENVIRONMENT = "shadho.key", "env"

#: pattern of the URL in ENVIRONMENT: password, host, port
_URL = re.compile(rf"redis://:([0-9a-f]{{32}})@\[?({HOST})\]?:(?P<port>[0-9]{{1,5}})/0")


class Access(Struct, frozen=True, array_like=True):
    """The facts that a machine needs to use a fleet."""

    #: name or address of the machine with the Redis server
    host: Annotated[str, Meta(pattern=rf"\A{HOST}\Z")]
    port: Annotated[int, Meta(ge=1, le=65535)]
    #: password of Redis
    password: Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
    #: content of the signing key's file
    key: Annotated[str, Meta(min_length=MIN_BYTES, max_length=1000)]

    @property
    def address(self) -> str:
        """Host and port, as in a URL."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    @property
    def url(self) -> str:
        """URL of the Redis server, which is also the broker."""
        return f"redis://:{self.password}@{self.address}/0"

    def text(self) -> str:
        """Return the text from which `read_access` reads this record."""
        data = encoded(self)
        # The checksum detects a text that was not copied completely.
        data = hashlib.sha256(data).digest()[:4] + data
        return f"shadho{PROTOCOL}.{base64.urlsafe_b64encode(data).decode().rstrip('=')}"


def read_access(text: str) -> Access:
    """Return the record in a text; words before it are ignored. Raises UsageError if it was not copied completely, or
    if it is from another version of this package.
    """
    found = TEXT.fullmatch((text.split() or [""])[-1])
    if found is not None and int(found[1]) != PROTOCOL:
        raise UsageError(
            f"--join: the fleet speaks protocol {int(found[1])}, and this machine {PROTOCOL}; install the same version "
            "of shadho_celery on both"
        )
    with suppress(ValueError, RecursionError):
        data = base64.urlsafe_b64decode(found[2] + "=" * (-len(found[2]) % 4)) if found else b""
        access = msgspec.json.decode(data[4:], type=Access)
        if found is not None and access.text() == found[0]:
            return access
    raise UsageError(
        "--join: this is neither the text that shadho-celery fleet start prints after --join, complete and unchanged, "
        "nor a file with it; copy its line again"
    )


def state_folder(name: str) -> Path:
    """Return the folder of a fleet's files, below XDG_STATE_HOME or ``~/.local/state``. It need not exist."""
    home = os.environ.get("XDG_STATE_HOME", "")
    # The specification of the variable says that a relative path is ignored.
    root = Path(home) if home.startswith("/") else Path(os.path.expanduser("~/.local/state"))  # noqa: PTH111 -- without a home, it does not raise
    return root / "shadho_celery" / name


@contextmanager
def created(folder: Path) -> Iterator[None]:
    """Create the folder of a fleet's files for the block that writes them. Raises UsageError for an OSError."""
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        yield
    except OSError as error:
        raise UsageError(
            f"{folder} cannot be written: {error.strerror}; make it writable, or name another folder in XDG_STATE_HOME"
        ) from None


def save(access: Access, folder: Path) -> dict[str, str]:
    """Write the files SIGNING_KEY and ENVIRONMENT, which only this user can read. Return the environment variables.

    Raises OSError.
    """
    variables = {urls.OWN_BROKER: access.url, urls.REDIS: access.url, KEY_FILE: str(folder / SIGNING_KEY)}
    exports = "".join(f"export {name}={shlex.quote(value)}\n" for name, value in variables.items())
    for name, content in {SIGNING_KEY: access.key, ENVIRONMENT: exports}.items():
        with replacing(folder / name, 0o600) as file:
            file.write(content.encode())
    return variables


def saved(folder: Path) -> Access | None:
    """Return the record in the files that `save` has written, with the current signing key, or None if there are none.

    Raises UsageError if a file is missing, damaged or readable for others.
    """
    if not (folder / ENVIRONMENT).exists():
        return None
    remedy = f"restore it, or remove {folder} to begin with a new fleet"
    key, exports = (
        read_text(folder / name, str(folder / name), remedy, is_secret=True) for name in (SIGNING_KEY, ENVIRONMENT)
    )
    with suppress(ValueError):
        if found := _URL.search(exports):
            return msgspec.convert([found[2], int(found["port"]), found[1], key], Access)
    raise UsageError(f"{folder} has no URL or no key of a fleet; {remedy}")
