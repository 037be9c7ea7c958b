"""Policy of a fleet: its users with their public keys, weights and limits, in one TOML text that an admin has signed.

Keys are Ed25519 keys: 64 hexadecimal digits in a file that only its user can read, and the public key, 64 digits too.
The policy is kept in Redis under ``shadho:policy``. Machines have only the public keys of the admins, in a file that
SHADHO_ADMINS_FILE names. Without that file, names of users are no proof, and everybody may do everything. With it, a
study runs and a request is obeyed only if a user of the policy has signed it. The latest policy that was good stays in
force if Redis loses it, or if somebody replaces it by a broken, unsigned or older one.

This protects users from mistakes and from commands of others. It does not protect them from a person who has the
scheduler's password of Redis or of the broker, or who changes the package on a machine.
"""

from __future__ import annotations

import logging
import math
import os
import re
import threading
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import redis
from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, decoder, encoded, one_line
from shadho_celery.core.files import as_toml, read_text
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.core.trial import Number, Positive
from shadho_celery.core.units import counted
from shadho_celery.core.users import ADMINS_FILE, USER, USER_KEY_FILE, UserName, own_user
from shadho_celery.errors import UsageError
from shadho_celery.fleet.redis import Redis, refusals
from shadho_celery.fleet.signing import CONTROL_KEY_FILE

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

log = logging.getLogger(__name__)

KEY = "shadho:policy"

#: maximum number of characters of a policy, and of its signed form in Redis
MAX_POLICY, MAX_SIGNED = 500_000, 2_000_000

#: seconds between two readings of the policy
READ_SECONDS = 2.0

_PublicKey = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z", description="64 lower-case hexadecimal digits")]
#: reason to refuse everybody
NO_POLICY = "this fleet has admins, but no policy yet; one of them sets it: shadho-celery fleet policy set FILE"

#: signature by a user, or "" for none
Proof = Annotated[str, Meta(pattern=r"^([0-9a-f]{128})?\Z")]


class User(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A user of the policy."""

    key: _PublicKey
    #: weight of the user when slots are shared with other users
    weight: Annotated[Positive, Meta(description="a number above 0")] = 1.0
    #: most slots that all studies of the user take together; None without a limit
    slots: Annotated[int, Meta(ge=0, le=10**6, description="most slots of all studies of the user")] | None = None
    #: True if the user may also act on studies of others, on workers and on folders
    admin: bool = False


class Policy(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The users of a fleet by name."""

    #: number that rises with each version of the policy
    number: Annotated[Number, Meta(description="a whole number that rises with each version")]
    users: dict[Annotated[UserName, Meta(min_length=1)], User]


class Signed(Struct, frozen=True, kw_only=True):
    """A policy as it is kept in Redis."""

    text: Annotated[str, Meta(max_length=MAX_POLICY)]
    #: public key of the admin who has signed it
    key: _PublicKey
    proof: Proof


_decode = decoder(Signed)


class _Anybody(frozenset[str]):
    """All public keys."""

    def __contains__(self, key: object) -> bool:
        return True


#: for machines without a file of admins, which only show the policy
ANYBODY = _Anybody()


def read_policy(text: str, name: str = "the policy") -> Policy:
    """Return the policy in a TOML text. Raises UsageError, with `name`, if it is not a policy."""
    if len(text) > MAX_POLICY:
        raise UsageError(f"{name} has more than {MAX_POLICY:,} characters")
    return as_toml(text, name, _as_policy)


def _as_policy(found: dict[str, object]) -> Policy:
    remedy = "see shadho-celery fleet policy set --help"
    # The users come first, because an error about the whole policy does not name the user.
    if isinstance(users := found.get("users"), dict):
        for name, user in users.items():
            as_record(user, User, f"users.{one_line(name, 60)}", remedy)
    return as_record(found, Policy, "", remedy)


def opened(text: str, admins: Collection[str]) -> tuple[Policy, str]:
    """Return the policy in its signed form, and its TOML text. Raises UsageError unless one of `admins` has signed it.

    `admins` are public keys.
    """
    try:
        signed: Signed = _decode(text)
    except (ValueError, RecursionError):
        raise UsageError("the policy in Redis is broken") from None
    if signed.key not in admins or not is_signed(signed.key, signed.proof, f"{KEY} {signed.text}"):
        raise UsageError("the policy in Redis is not signed by an admin")
    return read_policy(signed.text, "the policy in Redis"), signed.text


class UserKey:
    """Key pair of a user."""

    def __init__(self, seed: bytes) -> None:
        """Use the key with these 32 bytes. Raises UsageError if `cryptography` is not installed."""
        self._key: Ed25519PrivateKey = _ed25519().Ed25519PrivateKey.from_private_bytes(seed)
        self.public: str = self._key.public_key().public_bytes_raw().hex()

    @classmethod
    def configured(cls) -> UserKey | None:
        """Return the key in the file that SHADHO_USER_KEY_FILE names, or None. Raises UsageError if it is not a key."""
        if not (named := os.environ.get(USER_KEY_FILE)):
            return None
        path = Path(named).expanduser()
        text = read_text(path, f"the user's key file {path}", is_secret=True).strip()
        if not re.fullmatch("[0-9a-f]{64}", text):
            raise UsageError(f"the user's key file {path} has no key; make one: shadho-celery fleet key {path}")
        return cls(bytes.fromhex(text))

    def sign(self, text: str) -> str:
        """Return the signature of a text."""
        return self._key.sign(text.encode(errors="surrogatepass")).hex()


def _ed25519() -> Any:
    # Imported here because only fleets with a policy need it.
    try:
        from cryptography.hazmat.primitives.asymmetric import ed25519
    except ModuleNotFoundError:
        raise UsageError(
            'keys of users need cryptography; install it on all machines, in the checkout: pip install -e ".[torch]"'
        ) from None
    return ed25519


def is_signed(key: str, proof: str, text: str) -> bool:
    """Return whether `proof` is the signature of a text with this public key."""
    ed25519 = _ed25519()
    from cryptography.exceptions import InvalidSignature

    try:
        public = ed25519.Ed25519PublicKey.from_public_bytes(bytes.fromhex(key))
        public.verify(bytes.fromhex(proof), text.encode(errors="surrogatepass"))
    except (InvalidSignature, ValueError):
        return False
    return True


#: `is_signed` for the proofs of studies, which are short and come with each message; a request may have a megabyte
_is_proof = lru_cache(maxsize=4096)(is_signed)


def proof_of(record: Any, about: str = "") -> str:
    """Return the signature of a record, without its field `proof`, by this process's user; "" without a key."""
    key = _own_key()
    return "" if key is None else key.sign(_signed(record, about))


#: path of a key file, or None -> the last key that was read there
_last: dict[str | None, UserKey | None] = {}


def _own_key() -> UserKey | None:
    """Return the key of this process's user, or the last one that could be read: the file may vanish for a moment."""
    path = os.environ.get(USER_KEY_FILE)
    with suppress(UsageError):
        _last[path] = UserKey.configured()
    return _last[path] if path in _last else UserKey.configured()


def _signed(record: Any, about: str) -> str:
    fields = {name: getattr(record, name) for name in record.__struct_fields__ if name != "proof"}
    return f"{type(record).__name__} {about} {encoded(fields).decode()}"


def study_text(study: str, owner: str) -> str:
    """Return the text by whose signature a user says that the study with this key is his."""
    return f"study {study} of {owner}"


def read_admins(path: Path) -> frozenset[str]:
    """Return the public keys in a file: one on each line, and after it anything, such as a name.

    Raises UsageError if a line has no key, or if there is none.
    """
    lines = read_text(path, f"the file of admins {path}").splitlines()
    keys = [line.split()[0] for line in lines if line.strip() and not line.lstrip().startswith("#")]
    if not keys or any(not re.fullmatch("[0-9a-f]{64}", key) for key in keys):
        raise UsageError(f"the file of admins {path} must have public keys of 64 hexadecimal digits, one on each line")
    return frozenset(keys)


class Guard:
    """Checks studies and requests against the policy in force. Any thread may use it."""

    def __init__(self, client: Redis, admins: Collection[str], clock: Clock | None = None) -> None:
        self._client, self._admins, self._clock = client, admins, clock or SystemClock()
        self._policy: Policy | None = None
        self._text: str | None = None
        self._read_at, self._lock = -math.inf, threading.Lock()
        #: reason why the policy that is now in Redis is ignored, or ""
        self.warning = ""

    @classmethod
    def configured(cls, client: Redis) -> Guard | None:
        """Return a guard with the admins in SHADHO_ADMINS_FILE, or None without that file or in an embedded fleet.

        Raises UsageError if the fleet has a policy, but this process has no such file.
        """
        if os.environ.get(CONTROL_KEY_FILE):
            return None
        if not (path := os.environ.get(ADMINS_FILE)):
            # An earlier list of the server's users may not let workers read the policy.
            with refusals(lambda error: isinstance(error, redis.ResponseError)):
                if client.exists(KEY):
                    raise UsageError(f"this fleet has a policy; name the file with its admins' keys in {ADMINS_FILE}")
            return None
        _ed25519()
        return cls(client, read_admins(Path(path).expanduser()))

    def check(self) -> None:
        """Raise redis-py's errors unless this process may read the policy."""
        self._client.getrange(KEY, 0, 0)

    @property
    def users(self) -> Mapping[str, User]:
        """The users of the policy in force by name."""
        return {} if (policy := self.policy) is None else policy.users

    @property
    def policy(self) -> Policy | None:
        """The latest good policy, which is read again after READ_SECONDS; None before there was one."""
        with self._lock:
            if self._clock.now() - self._read_at >= READ_SECONDS:
                self._read_at = self._clock.now()
                # While Redis does not answer, the policy stays in force.
                try:
                    self._read(self._client.getrange(KEY, 0, MAX_SIGNED))
                except redis.RedisError as error:
                    log.debug("the policy cannot be read: %s", error)
            return self._policy

    def _read(self, text: str) -> None:
        if text == self._text or not text:
            return
        self._text, self.warning, before = text, "", self._policy
        try:
            found, _ = opened(text, self._admins)
            if before is not None and found != before and found.number <= before.number:
                raise UsageError(f"the policy in Redis has number {found.number}, not one above {before.number}")
            self._policy = found
        except UsageError as error:
            number = "none" if before is None else f"number {before.number}"
            self.warning = f"{one_line(error, 300)}; it is ignored, and {number} stays in force"
            log.warning("%s", self.warning)

    @property
    def trouble(self) -> str:
        """Why no policy is in force, or the policy in Redis is ignored; "" if all is well."""
        return (self.warning or NO_POLICY) if self.policy is None else self.warning

    def user(self, name: str, proof: str, text: str, check: Callable[[str, str, str], bool] = is_signed) -> User | str:
        """Return the user who has signed a text, or the reason why he is refused."""
        if (policy := self.policy) is None:
            return NO_POLICY
        if (user := policy.users.get(name)) is None:
            return f"{one_line(name, 80) or 'nobody'} is not a user of this fleet's policy; see {USER}"
        if not check(user.key, proof, text):
            return f"this is not signed with the key of user {name} in the policy; set {USER_KEY_FILE}"
        return user

    def refusal(self, record: Any, *owners: str, about: str = "") -> str | None:
        """Return the reason to refuse a signed record, which has the fields `by` and `proof`; None to obey it.

        The owners of a study and admins may act on it; only admins may act on anything else.
        """
        user = self.user(record.by, record.proof, _signed(record, about))
        if isinstance(user, str):
            return user
        if user.admin or record.by in owners:
            return None
        return _not_his(next(filter(None, owners), ""), record.by)

    def unwelcome(self, study: str, owner: str, proof: str) -> str | None:
        """Return why trials of a study may not run, or None. `study` is its key, and `proof` signs `study_text`."""
        user = self.user(owner, proof, study_text(study, owner), _is_proof)
        return user if isinstance(user, str) else None

    def notices(self, owner: str) -> list[str]:
        """Return what the user of a study should know: why a policy is ignored, and the limit on the user's slots."""
        user = self.users.get(owner)
        limit = None if user is None or user.slots is None else counted(user.slots, "slot")
        given = f"the fleet's policy gives all studies of {owner} together at most {limit}"
        return [*filter(None, [self.trouble]), *([given] if limit else [])]

    def refuse_self(self, owner: str | None = None) -> None:
        """Raise UsageError if the user of this process may not run studies, or may not act on those of `owner`.

        With "" as `owner`, only admins may act. Studies of a user who is not in the policy belong to everybody.
        """
        name, key, text = own_user(), UserKey.configured(), "this is me"
        user = self.user(name, "" if key is None else key.sign(text), text)
        if isinstance(user, str):
            raise UsageError(user)
        if not (user.admin or owner == name) and (owner == "" or owner in self.users):
            raise UsageError(_not_his(owner or "", name))


def _not_his(owner: str, name: str) -> str:
    return f"only {f'its owner {owner} or ' if owner else ''}an admin may do this, not {name}"


def need_right(client: Redis, owner: str | None = "") -> Guard | None:
    """Raise UsageError if the fleet has a policy by which this user may not act on studies of `owner` (`refuse_self`).

    Return a guard of that policy, or None without one.
    """
    guard = Guard(client, ANYBODY)
    if guard.policy is None:
        return None
    guard.refuse_self(owner)
    return guard
