"""What one key has signed is known from everything else; a key is read only from a file that is its owner's alone."""

from __future__ import annotations

import hashlib
import hmac
import sys
from pathlib import Path

import msgspec
import pytest

from shadho_celery.core.system import ManualClock
from shadho_celery.core.trial import GangCall
from shadho_celery.errors import UsageError
from shadho_celery.fleet.signing import (
    CONTROL_KEY_FILE,
    KEY_FILE,
    READ_SECONDS,
    UNSIGNED,
    UNSIGNED_CONTROL,
    Signer,
    read_keys,
)

KEY, OTHER, THIRD = b"0123456789abcdef", b"another key of a fleet", b"the next key of a fleet"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "shadho.key"
    path.write_bytes(KEY + b"\n")
    path.chmod(0o600)
    return path


def test_a_signature_is_hmac_sha256_of_the_text() -> None:
    assert Signer(KEY).sign("größe") == hmac.new(KEY, "größe".encode(), hashlib.sha256).hexdigest()


def test_a_signature_holds_for_its_text_and_its_key_only() -> None:
    signer = Signer(KEY)
    signature = signer.sign("text")
    assert signer.is_signed("text", signature)
    assert not signer.is_signed("texts", signature)
    assert not Signer(KEY[::-1]).is_signed("text", signature)


@pytest.mark.parametrize("forged", ["", "None", "0" * 64, "ü" * 64, "\udcff", "a" * 10_000])
def test_whatever_stands_where_a_signature_should_is_refused_without_an_error(forged: str) -> None:
    assert not Signer(KEY).is_signed("text", forged)


def test_without_a_key_nothing_is_signed_and_everything_passes() -> None:
    assert UNSIGNED.sign("text") == UNSIGNED.fingerprint == ""
    assert UNSIGNED.is_signed("text", "")
    assert UNSIGNED.is_signed("text", "anything")


@pytest.mark.parametrize("secret", ["", "s3cr3t", "größe", "x" * 256])
def test_a_secret_is_read_with_the_same_key_for_the_same_purpose_only(secret: str) -> None:
    one = Signer(KEY)
    text = one.encrypt(secret, "call 1")
    assert text != one.encrypt(secret, "call 1"), "no nonce is used twice"
    assert not secret or secret not in text
    assert Signer(KEY).decrypt(text, "call 1") == secret
    changed = text[:-6] + ("A" if text[-6] != "A" else "B") + text[-5:]
    for signer, given, purpose in (
        (Signer(KEY[::-1]), text, "call 1"),
        (one, text, "call 2"),
        (one, changed, "call 1"),
        (one, text[:20], "call 1"),
        (one, secret, "call 1"),
        (one, "aes:", "call 1"),
    ):
        with pytest.raises(UsageError, match="was not encrypted with this worker's signing key"):
            signer.decrypt(given, purpose)


def test_without_a_key_a_secret_travels_as_it_is() -> None:
    assert UNSIGNED.encrypt("secret", "call 1") == UNSIGNED.decrypt("secret", "call 1") == "secret"


def test_an_encrypted_token_is_a_token_of_a_message() -> None:
    token = Signer(KEY).encrypt("x" * 256, "call 1")
    assert GangCall(address="h:1", token=token) == msgspec.convert({"address": "h:1", "token": token}, GangCall)


def test_a_worker_without_the_library_for_it_says_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cryptography.hazmat.primitives.ciphers.aead", None)
    for call in (Signer(KEY).encrypt, Signer(KEY).decrypt):
        with pytest.raises(UsageError, match=r"needs cryptography; .* pip install -e \"\.\[torch\]\""):
            call("secret", "call 1")


def test_a_fingerprint_tells_keys_apart_and_does_not_hold_them() -> None:
    one, other = Signer(KEY), Signer(KEY[::-1])
    assert one.fingerprint == Signer(KEY).fingerprint != other.fingerprint
    assert KEY.hex() not in one.fingerprint
    assert len(one.fingerprint) == 8


def test_the_key_is_the_files_text_without_the_space_around_it(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert read_keys(file) == (KEY,)
    monkeypatch.setenv(KEY_FILE, str(file))
    assert Signer.configured().sign("text") == Signer(KEY).sign("text")


def test_without_a_file_named_there_is_no_key(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(KEY_FILE, raising=False)
    assert Signer.configured() is UNSIGNED
    monkeypatch.setenv(KEY_FILE, "")
    assert Signer.configured() is UNSIGNED


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o660, 0o644, 0o620])
def test_a_key_that_others_can_read_or_write_is_refused_with_the_remedy(file: Path, mode: int) -> None:
    file.chmod(mode)
    with pytest.raises(UsageError, match=f"chmod 600 {file}") as caught:
        read_keys(file)
    assert "\n" not in str(caught.value)


def test_a_short_key_and_a_file_that_cannot_be_read_are_refused_by_name(file: Path, tmp_path: Path) -> None:
    file.write_bytes(KEY[:-1] + b"   \n\n")
    for path in (file, tmp_path / "missing", tmp_path):
        with pytest.raises(UsageError, match=str(path)) as caught:
            read_keys(path)
        assert "\n" not in str(caught.value)
        assert KEY[:-1].decode() not in str(caught.value)


def test_text_that_is_none_has_a_signature_of_its_own() -> None:
    signer = Signer(KEY)
    signed = {text: signer.sign(text) for text in ("?", "\udcff", "\ud800", "\\udcff", "\ufffd")}
    assert len({*signed.values()}) == len(signed)
    assert not signer.is_signed("a\udcff", signer.sign("a?"))


def test_control_needs_a_key_or_permission_to_do_without(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (KEY_FILE, CONTROL_KEY_FILE, UNSIGNED_CONTROL):
        monkeypatch.delenv(name, raising=False)
    assert Signer.for_control() is None
    monkeypatch.setenv(UNSIGNED_CONTROL, "1")
    unsigned = Signer.for_control()
    assert unsigned is not None
    assert unsigned.fingerprint == ""
    monkeypatch.setenv(UNSIGNED_CONTROL, "0")
    monkeypatch.setenv(KEY_FILE, str(file))
    signed = Signer.for_control()
    assert signed is not None
    assert signed.fingerprint == Signer(KEY).fingerprint
    other = file.with_name("control.key")
    other.write_bytes(KEY[::-1])
    other.chmod(0o600)
    monkeypatch.setenv(CONTROL_KEY_FILE, str(other))
    embedded = Signer.for_control()
    assert embedded is not None
    assert embedded.fingerprint == Signer(KEY[::-1]).fingerprint


def write(file: Path, *keys: bytes) -> None:
    file.write_bytes(b"\n".join(keys) + b"\n")
    file.chmod(0o600)


def test_the_first_of_two_keys_signs_and_encrypts_and_both_are_accepted() -> None:
    both = Signer(OTHER, KEY)
    assert both.fingerprints == (Signer(OTHER).fingerprint, Signer(KEY).fingerprint)
    assert both.fingerprint == Signer(OTHER).fingerprint
    assert both.sign("text") == Signer(OTHER).sign("text")
    for one in (Signer(KEY), Signer(OTHER)):
        assert both.is_signed("text", one.sign("text"))
        assert both.decrypt(one.encrypt("secret", "call 1"), "call 1") == "secret"
    assert not both.is_signed("text", Signer(THIRD).sign("text"))
    assert Signer(OTHER).decrypt(both.encrypt("secret", "call 1"), "call 1") == "secret"
    with pytest.raises(UsageError, match="was not encrypted"):
        both.decrypt(Signer(THIRD).encrypt("secret", "call 1"), "call 1")


@pytest.mark.parametrize(
    ("lines", "words"),
    [
        ((KEY, OTHER, THIRD), "has 3 keys; keep 2"),
        ((KEY, KEY), "has the same key twice"),
        ((KEY, KEY[:-1]), "a key under 16 bytes"),
        ((b"", b""), "a key under 16 bytes"),
    ],
)
def test_a_file_that_is_no_key_or_rotation_is_refused_in_one_line(
    file: Path, lines: tuple[bytes, ...], words: str
) -> None:
    write(file, *lines)
    with pytest.raises(UsageError, match=f"{file} has .*{words.removeprefix('has ')}") as caught:
        read_keys(file)
    assert "\n" not in str(caught.value)
    assert not any(key.decode() in str(caught.value) for key in lines if key)


def test_empty_lines_and_the_line_ends_of_windows_are_no_part_of_a_key(file: Path) -> None:
    file.write_bytes(b"\xef\xbb\xbf" + KEY + b"\r\n\r\n" + OTHER + b"\r\n")
    assert read_keys(file) == (KEY, OTHER)


def test_a_signer_follows_its_file_through_a_rotation(file: Path) -> None:
    """So does one whose next rotation begins, or that is left half done: it accepts what its file has."""
    clock = ManualClock()
    signer = Signer.of_file(file, clock)
    steps = [(KEY, OTHER), (OTHER, KEY), (OTHER,), (OTHER, THIRD), (KEY,)]
    for keys in steps:
        before = signer.fingerprints
        write(file, *keys)
        assert signer.fingerprints == before, "the file is read at most once in READ_SECONDS"
        clock.sleep(READ_SECONDS)
        assert signer.sign("text") == Signer(keys[0]).sign("text")
        assert [signer.is_signed("text", Signer(key).sign("text")) for key in (KEY, OTHER, THIRD)] == [
            key in keys for key in (KEY, OTHER, THIRD)
        ]


def test_a_signer_follows_its_file_if_the_program_changes_its_folder(
    file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = ManualClock()
    monkeypatch.chdir(file.parent)
    signer = Signer.of_file(Path(file.name), clock)
    monkeypatch.chdir("/")
    write(file, OTHER)
    clock.sleep(READ_SECONDS)
    assert signer.fingerprint == Signer(OTHER).fingerprint


def test_a_broken_file_keeps_the_last_keys_and_is_warned_of_once(file: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = ManualClock()
    signers = [Signer.of_file(file, clock) for _ in range(2)]

    def broken(words: str) -> None:
        caplog.clear()
        for _ in range(3):
            clock.sleep(READ_SECONDS)
            assert {signer.fingerprints for signer in signers} == {(Signer(KEY).fingerprint,)}
        [line] = caplog.messages
        assert words in line
        assert "\n" not in line

    write(file, KEY, OTHER[:5])
    broken("a key under 16 bytes; make one with openssl rand -hex 32; the keys that were read before stay in force")
    write(file, KEY, OTHER, THIRD)
    broken("has 3 keys")
    file.chmod(0o644)
    broken("chmod 600")
    file.unlink()
    broken("cannot be read")
    write(file, OTHER, KEY)
    clock.sleep(READ_SECONDS)
    assert {signer.fingerprint for signer in signers} == {Signer(OTHER).fingerprint}
