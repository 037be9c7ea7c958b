"""A Redis server for a small fleet, which any user starts on a machine without installing or configuring a server.

Its supervisor is that of an embedded fleet, without workers. It continues after the command that has started it. The
state folder keeps the address, the password, the signing key and what Redis has recorded.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path

import msgspec.structs
import psutil

from shadho_celery.core.addresses import LOOPBACK, listen, own_address
from shadho_celery.core.checks import short
from shadho_celery.core.files import LOCK, LOCK_SECONDS, is_locked, replacing
from shadho_celery.embedded.embedded import Embedded, lock_folder
from shadho_celery.errors import ServiceError, UsageError
from shadho_celery.fleet.access import HOST, Access, created, save, saved, state_folder
from shadho_celery.fleet.redis import connect

#: port of Redis, unless another one is given; that of most Redis servers is left to them
PORT = 6390


def own_folder() -> Path:
    """Return the state folder of this user's fleet."""
    return state_folder("fleet")


def start(host: str | None, port: int | None) -> tuple[Access, bool]:
    """Start the fleet's Redis, with the address and the keys of its last start. Return its record, and whether it was
    started; False means that it runs already.

    A given `host` or `port` replaces the last one. Raises UsageError if this machine cannot listen there, or if the
    running fleet has another address, and ServiceError if Redis does not start.
    """
    folder = own_folder()
    with _changing(folder):
        known = saved(folder)
        last = known or Access(own_address(), PORT, secrets.token_hex(16), f"{secrets.token_hex(32)}\n")
        access = Access(host or last.host, port or last.port, last.password, last.key)
        # The lock of a supervisor that has just been killed is free when its Redis has ended, too.
        if known and is_locked(folder / LOCK, 1.0):
            if access != known:
                raise UsageError(
                    f"the fleet runs on {known.address}; shadho-celery fleet stop, then start it elsewhere"
                )
            connect(known.url, f"see its logs in {folder}").close()
            return known, False
        bound = _bound(access)
        save(access, folder)
        config = folder / "redis.conf"
        with replacing(config, 0o600) as file:
            file.write(f"bind {bound}\nport {access.port}\nrequirepass {access.password}\n".encode())
        local = msgspec.structs.replace(access, host=LOOPBACK)
        redis = Embedded(folder, {}, [], 1, config=str(config), url=local.url)
        redis.await_redis()
        connect(access.url, "give a --host by which this machine reaches itself, too").close()
        redis.detach()
    return access, True


def stop() -> bool:
    """Stop the fleet's Redis, and return whether it ran. What is recorded stays.

    Raises ServiceError if it does not end, for example because it runs on another machine.
    """
    folder = own_folder()
    if not is_locked(folder / LOCK):
        return False
    with _changing(folder):
        with suppress(psutil.Error, ValueError):
            supervisor = psutil.Process(int((folder / LOCK).read_text(errors="replace")))
            # On a disk that machines share, the number may be that of another process.
            if "shadho_celery.embedded.supervisor" in supervisor.cmdline():
                supervisor.terminate()
        if is_locked(folder / LOCK, LOCK_SECONDS):
            raise ServiceError(f"the fleet does not end; stop it where it was started, or see its logs in {folder}")
    return True


@contextmanager
def _changing(folder: Path) -> Iterator[None]:
    """Create the state folder, and let no other process start or stop the fleet in the block."""
    with created(folder):
        lock = lock_folder(folder, "changing")
        try:
            yield
        finally:
            os.close(lock)


def _bound(access: Access) -> str:
    """Return the addresses on which Redis listens. Raises UsageError if this machine cannot listen on one of them."""
    if re.fullmatch(HOST, access.host) is None or access.host in {"0.0.0.0", "::"}:
        raise UsageError(f"{short(access.host, 60)} is not the name or the address of a machine; give another --host")
    found = []
    for host in (access.host, LOOPBACK):
        try:
            with closing(listen(host, access.port, for_others=host != LOOPBACK)) as probe:
                found.append(str(probe.getsockname()[0]))
        except UsageError as error:
            raise UsageError(f"{error}, or give another --host") from error
    # 0.0.0.0 stands for all addresses of the machine.
    return found[0] if found[0] == "0.0.0.0" else " ".join(dict.fromkeys(found))
