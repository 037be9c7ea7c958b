"""Name of the user for whom a process acts: SHADHO_USER, or login@host. It is a name, not a proof of identity."""

from __future__ import annotations

import getpass
import os
import socket
from typing import Annotated

from msgspec import Meta

from shadho_celery.core.checks import short
from shadho_celery.errors import UsageError

#: environment variable with the name of the user
USER = "SHADHO_USER"

#: environment variables that name the file with the public keys of a fleet's admins, and the file with the user's key
ADMINS_FILE, USER_KEY_FILE = "SHADHO_ADMINS_FILE", "SHADHO_USER_KEY_FILE"

#: maximum number of characters of a user's name
MAX_USER = 255

#: name of a user: a printable word, or "" if it is not known
UserName = Annotated[str, Meta(pattern=r"^[^\s\x00-\x1f\x7f\ud800-\udfff]*\Z", max_length=MAX_USER)]


def own_user() -> str:
    """Return the user for whom this process acts. Raises UsageError if SHADHO_USER cannot be a name."""
    if (name := os.environ.get(USER)) is not None and name.strip():
        if len(name) > MAX_USER or " " in name or not name.isprintable():
            raise UsageError(f"{USER} is {short(name, 60)}; give a name of up to {MAX_USER} characters without spaces")
        return name
    # Python raises one of these errors if the system's list of users lacks this user, as in some containers.
    try:
        login = getpass.getuser()
    except (KeyError, OSError, ImportError):
        login = str(os.getuid())
    return "".join(f"{login}@{socket.gethostname()}"[:MAX_USER].split())
