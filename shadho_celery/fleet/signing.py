"""Signing and encryption: with a key, messages and events are signed (HMAC), and unsigned ones are refused.

Without a key, any client of the broker can send a message, and any client of Redis can send a result. With a key that
only the fleet's processes can read, messages and events of other clients are refused. Create a key with ``openssl rand
-hex 32 > shadho.key``. To replace a key while studies run, give the file two lines for a while: the key in the first
line signs, and both are accepted.

Secrets in messages, such as the tokens of gangs, are encrypted (AES-256-GCM) with a key that is derived from the
signing key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import logging
import os
import secrets
from contextlib import suppress
from functools import cache, cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shadho_celery.core.checks import decoder, encoded
from shadho_celery.core.files import read_bytes
from shadho_celery.core.system import Clock, SystemClock
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

R = TypeVar("R")

log = logging.getLogger(__name__)

#: environment variable that names the file with the key
KEY_FILE = "SHADHO_SIGNING_KEY_FILE"

#: environment variable that names the file with the key of an embedded fleet's control requests
CONTROL_KEY_FILE = "SHADHO_CONTROL_KEY_FILE"

#: environment variable that is 1 if control requests should be obeyed although there is no key
UNSIGNED_CONTROL = "SHADHO_ALLOW_UNSIGNED_CONTROL"

#: minimum number of bytes of a key, and maximum number of keys in a file
MIN_BYTES, MOST_KEYS = 16, 2

#: minimum seconds between two reads of a file of keys. The file is read, not only its time, because a network file
#: system shows the latest file at once only to a process that opens it
READ_SECONDS = 1.0

#: prefix of an encrypted secret
_MARK = "aes:"

#: bytes of the random nonce at the start of an encrypted secret
_NONCE_BYTES = 12


class _Key:
    """One key, which signs with HMAC-SHA256 and encrypts with AES-256-GCM."""

    def __init__(self, secret: bytes) -> None:
        self._secret = secret
        #: identifies the key without disclosing it
        self.fingerprint = self.sign("fingerprint")[:8]

    def sign(self, text: str) -> str:
        # Forged texts may contain unpaired surrogates, which must not raise an error.
        return hmac.digest(self._secret, text.encode(errors="surrogatepass"), hashlib.sha256).hex()

    @cached_property
    def cipher(self) -> AESGCM:
        # Imported here because only gangs need it.
        try:
            from cryptography.hazmat.primitives.ciphers.aead import AESGCM
            from cryptography.hazmat.primitives.hashes import SHA256
            from cryptography.hazmat.primitives.kdf.hkdf import HKDF
        except ModuleNotFoundError:
            raise UsageError(
                "with a signing key the token of a gang is encrypted, which needs cryptography; "
                'install it on all workers, in the checkout: pip install -e ".[torch]"'
            ) from None
        return AESGCM(HKDF(SHA256(), 32, None, b"shadho secrets in messages").derive(self._secret))


class Signer:
    """Signs and encrypts with the first of its keys, and accepts signatures and secrets of all of them. Without a key,
    it neither signs nor encrypts, and accepts every signature.
    """

    def __init__(self, *keys: bytes) -> None:
        self._latest = tuple(_Key(key) for key in keys if key)
        self._path: Path | None = None
        self._clock: Clock = SystemClock()
        #: content of the file at the last read, and time of that read
        self._secrets, self._read_at = keys, 0.0

    @classmethod
    def of_file(cls, path: Path, clock: Clock | None = None) -> Signer:
        """Return a signer with the keys in a file, which it reads again every READ_SECONDS while it is used.

        If the file cannot be read later, the last keys stay in force. Raises UsageError as `read_keys` does.
        """
        signer = cls(*read_keys(path))
        # A program may change its folder, and would then read another file.
        signer._path, signer._clock = path.absolute(), clock or signer._clock
        signer._read_at = signer._clock.now()
        return signer

    @classmethod
    def configured(cls) -> Signer:
        """Return a signer with the keys in the file named by SHADHO_SIGNING_KEY_FILE, or UNSIGNED if that is not set.

        Raises UsageError as `read_keys` does.
        """
        path = os.environ.get(KEY_FILE)
        return cls.of_file(Path(path).expanduser()) if path else UNSIGNED

    @classmethod
    def for_control(cls) -> Signer | None:
        """Return the signer of control requests, or None if this process has no key and must refuse them.

        In a process of an embedded fleet, the key is the fleet's control key, else those of `configured`. Without a
        key, unsigned requests are obeyed only if SHADHO_ALLOW_UNSIGNED_CONTROL is 1. Raises like `configured`.
        """
        if path := os.environ.get(CONTROL_KEY_FILE):
            return cls(*read_keys(Path(path)))
        signer = cls.configured()
        return signer if signer.fingerprint or os.environ.get(UNSIGNED_CONTROL) == "1" else None

    @property
    def fingerprints(self) -> tuple[str, ...]:
        """Fingerprints of the keys, first of the one that signs; () without a key."""
        return tuple([key.fingerprint for key in self._keys])

    @property
    def fingerprint(self) -> str:
        """Fingerprint of the key that signs; "" without a key."""
        return next(iter(self.fingerprints), "")

    @property
    def _keys(self) -> tuple[_Key, ...]:
        if self._path is not None and (now := self._clock.now()) - self._read_at >= READ_SECONDS:
            self._read_at = now
            try:
                secrets = read_keys(self._path)
            except UsageError as error:
                _warn(f"{error}; the keys that were read before stay in force")
            else:
                if secrets != self._secrets:
                    self._secrets, self._latest = secrets, tuple(map(_Key, secrets))
        return self._latest

    def sign(self, text: str) -> str:
        """Return the signature of `text`, 64 hexadecimal digits. Without a key, return ""."""
        keys = self._keys
        return keys[0].sign(text) if keys else ""

    def seal(self, about: str, record: object) -> str:
        """Return a record as JSON, preceded by its signature if there is a key. The signature also covers `about`."""
        text = encoded(record).decode()
        return self.sign(about + text) + text

    def is_signed(self, text: str, signature: str) -> bool:
        """Return whether `signature` is that of `text` by one of the keys. Always True without a key."""
        keys = self._keys
        # Compare bytes: a forged signature may contain any characters, and `compare_digest` raises for text that is not
        # ASCII.
        given = signature.encode(errors="replace")
        return not keys or any(hmac.compare_digest(key.sign(text).encode(), given) for key in keys)

    def encrypt(self, secret: str, purpose: str) -> str:
        """Return `secret`, encrypted so that it can be decrypted only for `purpose`. Without a key, return it
        unchanged.

        Raises UsageError if `cryptography` is not installed.
        """
        keys = self._keys
        if not keys:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = nonce + keys[0].cipher.encrypt(nonce, secret.encode(), purpose.encode())
        return _MARK + base64.urlsafe_b64encode(data).decode()

    def decrypt(self, text: str, purpose: str) -> str:
        """Return the secret in `text`, which was encrypted for `purpose`. Without a key, return the text unchanged.

        Raises UsageError if it was encrypted for another purpose or with another key, or if `cryptography` is not
        installed.
        """
        ciphers = [key.cipher for key in self._keys]
        if not ciphers:
            return text
        from cryptography.exceptions import InvalidTag

        for cipher in ciphers:
            with suppress(InvalidTag, ValueError):
                data = base64.urlsafe_b64decode(text.removeprefix(_MARK))
                return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], purpose.encode()).decode()
        raise UsageError(
            "a gang's token was not encrypted with this worker's signing key; give all processes the same one"
        )


class Sealed(Generic[R]):
    """Decoder for texts of `Signer.seal` that contain records of one type or of a union of types."""

    def __init__(self, kind: Any, most: int) -> None:
        """Refuse texts of more than `most` characters. Create the object at import, before several threads use it."""
        self._decode = decoder(kind)
        #: maximum number of characters of a text
        self.most = most

    def read(self, about: str, sealed: str, signer: Signer) -> R | None:
        """Return the record in a text, or None if the text is malformed, too long, or lacks a required signature.

        The signature must also cover `about`. Without a key, signatures are ignored.
        """
        signature, brace, rest = sealed.partition("{")
        if len(sealed) > self.most or not signer.is_signed(about + brace + rest, signature):
            return None
        try:
            record: R = self._decode(brace + rest)
        except (ValueError, RecursionError):
            return None
        return record


def read_keys(path: Path) -> tuple[bytes, ...]:
    """Return the keys in a file, one in each line: the first signs, and a second one is accepted, too.

    Raises UsageError if the file cannot be read, if other users can read it, if a key is short, if the keys are equal,
    or if there are more than two.
    """
    name = f"the signing key file {path}"
    found = [line.strip() for line in read_bytes(path, name, is_secret=True).split(b"\n")]
    keys = tuple(line for line in found if line)
    if not keys or min(map(len, keys)) < MIN_BYTES:
        raise UsageError(f"{name} has a key under {MIN_BYTES} bytes; make one with openssl rand -hex 32")
    if len(keys) > MOST_KEYS:
        raise UsageError(f"{name} has {len(keys)} keys; keep {MOST_KEYS}: the one that signs now, and the next one")
    if len({*keys}) < len(keys):
        raise UsageError(f"{name} has the same key twice; remove one of the lines")
    return keys


@cache
def _warn(text: str) -> None:
    """Log a warning once, although several signers of this process may have the same file."""
    log.warning("%s", text)


#: signer of a fleet without a key
UNSIGNED = Signer()
