"""Code on its way to workers: signed, bounded, below its own folder, and written once."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import redis

from shadho_celery.core.code import MAX_SOURCES, Sources
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import ManualClock
from shadho_celery.errors import UsageError
from shadho_celery.fleet.channel import Shipping
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.node.code import AGAIN_SECONDS, ShippedCode

SIGNER = Signer(b"a key of sixteen bytes")
MESSAGE = Payload(study="k1", module="my_study", code="0123456789ab", is_shipped=True, attempts=[])
SOURCES = Sources(
    code=MESSAGE.code,
    files={"my_study.py": b"SPACE = 1\n", "parts/layers.py": "# größe\n".encode("latin-1"), "go.py": b"#!/bin/sh"},
)


def test_sources_arrive_to_the_byte_in_a_folder_of_their_version(client: redis.Redis, tmp_path: Path) -> None:
    shipping = Shipping(client, SIGNER)
    shipped = ShippedCode(shipping, tmp_path, ManualClock())
    assert shipped.lacks(MESSAGE) == "its study's code is not in Redis"
    shipping.send("k1", SOURCES)
    assert shipped.lacks(MESSAGE) == ""
    folder = shipped.folder(MESSAGE)
    assert folder == tmp_path / "k1" / "0123456789ab"
    assert {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*.py")} == SOURCES.files
    programs = [path for path in folder.rglob("*.py") if path.stat().st_mode & 0o100]
    assert [path.name for path in programs] == ["go.py"], "it can be the program of a command"
    client.flushdb()
    assert shipped.lacks(MESSAGE) == "", "they are asked for once"


def test_files_of_a_command_arrive_and_are_fetched_once(client: redis.Redis, tmp_path: Path) -> None:
    content = {name: os.urandom(size) for name, size in {"data/x.bin": 2_000_000, "run.sh": 10, "none": 0}.items()}
    digests = {name: hashlib.sha256(each).hexdigest() for name, each in content.items()}
    sources = msgspec.structs.replace(SOURCES, inputs=digests)
    shipping, clock = Shipping(client, SIGNER), ManualClock()
    shipped = ShippedCode(shipping, tmp_path, clock)
    shipping.send("k1", sources)
    assert shipped.lacks(MESSAGE).endswith("of its study is not in Redis")
    shipping.send("k1", sources, {digests[name]: each for name, each in content.items()})
    assert shipped.lacks(MESSAGE) == ""
    folder = shipped.folder(MESSAGE)
    assert {name: (folder / name).read_bytes() for name in content} == content
    assert os.access(folder / "run.sh", os.X_OK)
    client.delete("shadho:k1:inputs")
    later = msgspec.structs.replace(MESSAGE, code="ba9876543210")
    shipping.send("k1", msgspec.structs.replace(sources, code=later.code))
    assert shipped.lacks(later) == "", "the next version has the same files"
    script = shipped.folder(later) / "run.sh"
    script.chmod(0o755)
    script.write_bytes(b"changed")
    shipped.refuse(later, "it has other files")
    clock.sleep(AGAIN_SECONDS + 1)
    assert shipped.lacks(later) == ""
    assert script.read_bytes() == content["run.sh"], "a trial has changed its copy alone"
    (tmp_path / ".inputs" / digests["run.sh"]).unlink()
    shipped.refuse(later, "it has other files")
    clock.sleep(AGAIN_SECONDS + 1)
    assert shipped.lacks(later) == "the file run.sh of its study is not in Redis"
    for forged in ("QQ==", "no base64 \u00e9"):
        client.hset("shadho:k1:inputs", digests["run.sh"], forged)
        assert "run.sh" in shipped.lacks(later)


def test_a_version_that_cannot_run_is_refused_for_a_while_and_then_written_again(
    client: redis.Redis, tmp_path: Path
) -> None:
    shipping, clock = Shipping(client, SIGNER), ManualClock()
    shipping.send("k1", SOURCES)
    shipped = ShippedCode(shipping, tmp_path, clock)
    assert shipped.lacks(MESSAGE) == ""
    file = shipped.folder(MESSAGE) / "my_study.py"
    file.write_text("SPACE = 1 / 0")
    shipped.refuse(MESSAGE, "ZeroDivisionError")
    assert shipped.lacks(MESSAGE) == "ZeroDivisionError"
    assert shipped.unfit == {MESSAGE.code: "ZeroDivisionError"}
    clock.sleep(AGAIN_SECONDS + 1)
    assert shipped.unfit == {}
    assert shipped.lacks(MESSAGE) == ""
    assert file.read_bytes() == SOURCES.files["my_study.py"]


@pytest.fixture
def shared_umask() -> Iterator[None]:
    """The files of this process may be written by the user's group."""
    before = os.umask(0o002)
    yield
    os.umask(before)


def test_a_function_by_value_is_loaded_only_if_it_was_sent(
    client: redis.Redis, tmp_path: Path, shared_umask: None
) -> None:
    """Each run sends its own file, also under the same version; a file of another name is not looked for."""
    shipping = Shipping(client, SIGNER)
    shipped = ShippedCode(shipping, tmp_path, ManualClock())
    for name in ("f_1.pickle", "f_2.pickle"):
        message = msgspec.structs.replace(MESSAGE, module=name)
        assert shipped.lacks(message) == "its study's code is not in Redis"
        shipping.send("k1", Sources(code=MESSAGE.code, files={name: b"content"}))
        assert shipped.lacks(message) == ""
        written = shipped.folder(message) / name
        assert written.read_bytes() == b"content"
        assert written.stat().st_mode & 0o777 == 0o644, "whatever the umask: what others can write is not loaded"


def test_a_folder_that_cannot_be_written_is_told(client: redis.Redis, tmp_path: Path) -> None:
    Shipping(client, SIGNER).send("k1", SOURCES)
    (tmp_path / "code").write_text("a file")
    shipped = ShippedCode(Shipping(client, SIGNER), tmp_path / "code", ManualClock())
    assert "cannot be written to this disk" in shipped.lacks(MESSAGE)


@pytest.mark.parametrize(
    ("signer", "study"),
    [(Signer(b"another key of sixteen"), "k1"), (UNSIGNED, "k1"), (SIGNER, "k2")],
    ids=["another key", "no key", "another study"],
)
def test_sources_that_are_not_signed_with_our_key_for_this_study_are_not_taken(
    client: redis.Redis, signer: Signer, study: str
) -> None:
    client.set("shadho:k1:sources", signer.seal(f"shadho:{study}:sources", SOURCES))
    assert Shipping(client, SIGNER).fetch("k1") is None


def test_another_version_of_the_same_study_is_not_taken(client: redis.Redis, tmp_path: Path) -> None:
    """Whoever can write to Redis may lay an earlier one down again."""
    Shipping(client, SIGNER).send("k1", msgspec.structs.replace(SOURCES, code="ba9876543210"))
    assert ShippedCode(Shipping(client, SIGNER), tmp_path, ManualClock()).lacks(MESSAGE)
    assert not [*tmp_path.iterdir()]


def test_without_a_key_there_is_no_shipping(client: redis.Redis) -> None:
    with pytest.raises(UsageError, match="signed fleet only"):
        Shipping(client, UNSIGNED)


@pytest.mark.parametrize(
    "files",
    [
        {"../my_study.py": "QQ=="},
        {"/tmp/my_study.py": "QQ=="},
        {"a/../../b.py": "QQ=="},
        {"a\\b.py": "QQ=="},
        {"my study.py": "QQ=="},
        {".hidden.py": "QQ=="},
        {"my_study.py\n": "QQ=="},
        {"my_study.py": "no base64!"},
        {"my_study.py": 3},
        {"a/..": "QQ=="},
        {"./a": "QQ=="},
        {"a.py": "QUFB" * (MAX_SOURCES // 3 + 1)},
    ],
)
def test_paths_out_of_the_folder_and_too_many_bytes_are_refused_although_signed(
    client: redis.Redis, tmp_path: Path, files: dict[str, Any]
) -> None:
    key = "shadho:k1:sources"
    client.set(key, SIGNER.seal(key, {"code": MESSAGE.code, "files": files}))
    assert Shipping(client, SIGNER).fetch("k1") is None
    assert ShippedCode(Shipping(client, SIGNER), tmp_path / "code", ManualClock()).lacks(MESSAGE)
    assert not (tmp_path / "code").exists()
