"""Signing and encryption: with a key, messages and events are signed (HMAC), and unsigned ones are refused.

Without a key, any client of the broker can send a message, and any client of Redis can send a result. With a key that
only the fleet's processes can read, messages and events of other clients are refused. Create a key with ``openssl rand
-hex 32 > shadho.key``.

Secrets in messages, such as the tokens of gangs, are encrypted (AES-256-GCM) with a key that is derived from the
signing key.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os
import secrets
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, TypeVar

from shadho_celery.core.checks import decoder, encoded
from shadho_celery.core.files import read_bytes
from shadho_celery.errors import UsageError

if TYPE_CHECKING:
    from cryptography.hazmat.primitives.ciphers.aead import AESGCM

R = TypeVar("R")

#: environment variable that names the file with the key
KEY_FILE = "SHADHO_SIGNING_KEY_FILE"

#: environment variable that names the file with the key of an embedded fleet's control requests
CONTROL_KEY_FILE = "SHADHO_CONTROL_KEY_FILE"

#: environment variable that is 1 if control requests should be obeyed although there is no key
UNSIGNED_CONTROL = "SHADHO_ALLOW_UNSIGNED_CONTROL"

#: minimum number of bytes of a key
MIN_BYTES = 16

#: prefix of an encrypted secret
_MARK = "aes:"

#: bytes of the random nonce at the start of an encrypted secret
_NONCE_BYTES = 12


class Signer:
    """Signs and encrypts with one key (HMAC-SHA256, AES-256-GCM). Without a key it does neither, and accepts every
    signature.
    """

    def __init__(self, key: bytes = b"") -> None:
        self._key = key
        #: identifies the key without disclosing it; "" without a key
        self.fingerprint = self.sign("fingerprint")[:8]

    @classmethod
    def configured(cls) -> Signer:
        """Return a signer with the key in the file named by SHADHO_SIGNING_KEY_FILE, or UNSIGNED if that is not set.

        Raises UsageError if the file cannot be read, if other users can read it, or if the key is too short.
        """
        path = os.environ.get(KEY_FILE)
        return cls(read_key(Path(path).expanduser())) if path else UNSIGNED

    @classmethod
    def for_control(cls) -> Signer | None:
        """Return the signer of control requests, or None if this process has no key and must refuse them.

        In a process of an embedded fleet, the key is the fleet's control key, else that of `configured`. Without a key,
        unsigned requests are obeyed only if SHADHO_ALLOW_UNSIGNED_CONTROL is 1. Raises like `configured`.
        """
        if path := os.environ.get(CONTROL_KEY_FILE):
            return cls(read_key(Path(path)))
        signer = cls.configured()
        return signer if signer.fingerprint or os.environ.get(UNSIGNED_CONTROL) == "1" else None

    def sign(self, text: str) -> str:
        """Return the signature of `text`, 64 hexadecimal digits. Without a key, return ""."""
        # Forged texts may contain unpaired surrogates, which must not raise an error.
        secret = text.encode(errors="surrogatepass")
        return hmac.digest(self._key, secret, hashlib.sha256).hex() if self._key else ""

    def seal(self, about: str, record: object) -> str:
        """Return a record as JSON, preceded by its signature if there is a key. The signature also covers `about`."""
        text = encoded(record).decode()
        return self.sign(about + text) + text

    def is_signed(self, text: str, signature: str) -> bool:
        """Return whether `signature` is that of `text`. Always True without a key."""
        if not self._key:
            return True
        # Compare bytes: a forged signature may contain any characters, and `compare_digest` raises for text that is not
        # ASCII.
        return hmac.compare_digest(self.sign(text).encode(), signature.encode(errors="replace"))

    def encrypt(self, secret: str, purpose: str) -> str:
        """Return `secret`, encrypted so that it can be decrypted only for `purpose`. Without a key, return it
        unchanged.

        Raises UsageError if `cryptography` is not installed.
        """
        if not self._key:
            return secret
        nonce = secrets.token_bytes(_NONCE_BYTES)
        data = nonce + self._cipher.encrypt(nonce, secret.encode(), purpose.encode())
        return _MARK + base64.urlsafe_b64encode(data).decode()

    def decrypt(self, text: str, purpose: str) -> str:
        """Return the secret in `text`, which was encrypted for `purpose`. Without a key, return the text unchanged.

        Raises UsageError if it was encrypted for another purpose or with another key, or if `cryptography` is not
        installed.
        """
        if not self._key:
            return text
        cipher = self._cipher
        from cryptography.exceptions import InvalidTag

        try:
            data = base64.urlsafe_b64decode(text.removeprefix(_MARK))
            return cipher.decrypt(data[:_NONCE_BYTES], data[_NONCE_BYTES:], purpose.encode()).decode()
        except (InvalidTag, ValueError):
            raise UsageError(
                "a gang's token was not encrypted with this worker's signing key; give all processes the same one"
            ) from None

    @cached_property
    def _cipher(self) -> AESGCM:
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
        return AESGCM(HKDF(SHA256(), 32, None, b"shadho secrets in messages").derive(self._key))


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


def read_key(path: Path) -> bytes:
    """Return the key in a file. Raises UsageError if it cannot be read, if others can read it, or if it is short."""
    key = read_bytes(path, f"the signing key file {path}", is_secret=True).strip()
    if len(key) < MIN_BYTES:
        raise UsageError(f"the signing key file {path} is under {MIN_BYTES} bytes; run openssl rand -hex 32 > {path}")
    return key


#: signer of a fleet without a key
UNSIGNED = Signer()
