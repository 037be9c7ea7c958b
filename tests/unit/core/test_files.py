import os
import stat
from pathlib import Path

import pytest

from shadho_celery.core.files import read_bytes, replacing
from shadho_celery.errors import UsageError


def write(path: Path, content: bytes, mode: int | None = None) -> None:
    with replacing(path, mode) as file:
        file.write(content)


@pytest.mark.parametrize("error", [OSError, KeyboardInterrupt])
def test_an_error_in_the_middle_leaves_the_earlier_file_and_nothing_else(
    tmp_path: Path, error: type[BaseException]
) -> None:
    target = tmp_path / "file"
    write(target, b"earlier")

    def interrupted() -> None:
        with replacing(target) as file:
            file.write(b"half")
            file.flush()
            assert target.read_bytes() == b"earlier"
            raise error

    with pytest.raises(error):
        interrupted()
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == {"file": b"earlier"}


def test_a_disk_that_is_full_is_an_error_and_the_earlier_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = tmp_path / "file"
    write(target, b"earlier")
    monkeypatch.setattr(os, "open", lambda *_: _descriptor("/dev/full"))
    with pytest.raises(OSError, match="No space left"):
        write(target, b"later" * 10_000)
    assert target.read_bytes() == b"earlier"


_open = os.open


def _descriptor(path: str) -> int:
    return _open(path, os.O_WRONLY)


def test_a_new_file_has_the_permissions_of_any_new_file_and_a_later_one_those_of_the_earlier(tmp_path: Path) -> None:
    target, other = tmp_path / "file", tmp_path / "other"
    write(target, b"")
    other.touch()
    assert target.stat().st_mode == other.stat().st_mode
    target.chmod(0o640)
    write(target, b"later")
    assert stat.S_IMODE(target.stat().st_mode) == 0o640
    write(target, b"secret", 0o600)
    assert stat.S_IMODE(target.stat().st_mode) == 0o600


def test_a_link_stays_a_link_and_its_file_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    target, link = tmp_path / "folder" / "file", tmp_path / "link"
    link.symlink_to(target)
    for content in (b"first", b"second"):
        write(link, content)
        assert link.is_symlink()
        assert target.read_bytes() == content


def test_the_longest_name_can_be_replaced(tmp_path: Path) -> None:
    target = tmp_path / ("名" * 85)
    write(target, b"x")
    assert target.read_bytes() == b"x"


def test_a_device_is_written_to_and_stays() -> None:
    write(Path("/dev/null"), b"x")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize(("owner", "group", "may"), [(0, 1000, True), (0, 0, False), (1000, 1000, False)])
def test_the_group_to_which_root_has_given_a_secret_may_read_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, owner: int, group: int, may: bool
) -> None:
    """So are the secrets of Kubernetes. Others may never read it."""
    key, found = tmp_path / "key", os.fstat
    key.write_bytes(b"secret")
    monkeypatch.setattr(os, "fstat", lambda file: os.stat_result([*found(file)[:4], owner, group, *found(file)[6:]]))
    for mode, is_read in ((0o640, may), (0o440, may), (0o644, False), (0o660, False), (0o400, True)):
        key.chmod(mode)
        if is_read:
            assert read_bytes(key, "the key", is_secret=True) == b"secret"
        else:
            with pytest.raises(UsageError, match="other users can read the key"):
                read_bytes(key, "the key", is_secret=True)
