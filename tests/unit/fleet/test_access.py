"""The text with which a machine joins a fleet, and the files that it saves."""

from __future__ import annotations

import stat
import subprocess
from pathlib import Path

import pytest
from services.cases import cases

from shadho_celery.errors import UsageError
from shadho_celery.fleet import access as module
from shadho_celery.fleet.access import ENVIRONMENT, SIGNING_KEY, Access, read_access, save, saved, state_folder
from shadho_celery.fleet.broker import PROTOCOL

PASSWORD = "0123456789abcdef" * 2
ACCESS = Access("10.0.0.1", 6390, PASSWORD, "k" * 64 + "\n")


@cases(
    "host, address",
    [("10.0.0.1", "10.0.0.1:7"), ("gpu-1.example.org", "gpu-1.example.org:7"), ("fd00::1", "[fd00::1]:7")],
)
def test_the_text_has_the_whole_record_whatever_stands_before_it(host: str, address: str) -> None:
    """Also a key file of two lines."""
    access = Access(host, 7, PASSWORD, "first key of this fleet\nsecond key of this fleet\n")
    assert read_access(access.text()) == access
    assert read_access(f"  shadho-celery worker --join {access.text()}\n") == access
    assert access.url == f"redis://:{PASSWORD}@{address}/0"


def test_a_text_that_was_not_copied_as_it_is_is_refused_without_showing_it() -> None:
    whole = ACCESS.text()
    changed = [f"{whole[:at]}{'A' if whole[at] != 'A' else 'B'}{whole[at + 1 :]}" for at in range(9, len(whole))]
    others = ["", " ", "shadho", f"{whole}=", f"{whole}A", whole.upper(), "a" * 10_000, f"shadho{PROTOCOL}.e30"]
    for text in [*changed, *(whole[:end] for end in range(1, len(whole))), *others]:
        with pytest.raises(UsageError, match="copy its line again") as refused:
            read_access(text)
        assert not text.strip() or text.strip()[10:] not in str(refused.value) or len(text) < 30


def test_a_record_out_of_bounds_is_refused_although_its_text_is_complete() -> None:
    for host, port, password, key in [
        ("10.0.0.1;x", 1, PASSWORD, "k" * 64),
        ("h/0", 1, PASSWORD, "k" * 64),
        ("h", 0, PASSWORD, "k" * 64),
        ("h", 65536, PASSWORD, "k" * 64),
        ("h", 1, "'; rm -r", "k" * 64),
        ("h", 1, PASSWORD, "short"),
        ("h", 1, PASSWORD, "k" * 1001),
    ]:
        with pytest.raises(UsageError, match="copy its line again"):
            read_access(Access(host, port, password, key).text())


def test_a_fleet_of_another_version_is_named_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PROTOCOL", PROTOCOL + 1)
    text = ACCESS.text()
    monkeypatch.undo()
    expected = f"the fleet speaks protocol {PROTOCOL + 1}, and this machine {PROTOCOL}; install the same version"
    with pytest.raises(UsageError, match=expected):
        read_access(text)


def test_a_shell_gets_the_variables_from_files_that_only_this_user_can_read(tmp_path: Path) -> None:
    """Also where the folder's name needs quotes."""
    folder = tmp_path / "it's a folder"
    folder.mkdir()
    variables = save(ACCESS, folder)
    script = '. "$0" && echo "$SHADHO_BROKER_URL $SHADHO_REDIS_URL" && cat "$SHADHO_SIGNING_KEY_FILE"'
    shown = subprocess.run(["sh", "-c", script, folder / ENVIRONMENT], capture_output=True, text=True, check=True)
    assert shown.stdout == f"{ACCESS.url} {ACCESS.url}\n{ACCESS.key}"
    assert [*variables.values()] == [ACCESS.url, ACCESS.url, str(folder / SIGNING_KEY)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}


def test_the_saved_record_has_the_current_key(tmp_path: Path) -> None:
    assert saved(tmp_path) is None
    for access in (
        ACCESS,
        Access("fd00::1", 7, PASSWORD, ACCESS.key),
        Access("gpu-1.example.org", 7, PASSWORD, ACCESS.key),
    ):
        save(access, tmp_path)
        assert saved(tmp_path) == access
    (tmp_path / SIGNING_KEY).write_text("another key of this fleet")
    found = saved(tmp_path)
    assert found is not None
    assert found.key == "another key of this fleet"


@cases(
    "name, content, words",
    [
        (SIGNING_KEY, None, "cannot be read: No such file"),
        (SIGNING_KEY, "short", "has no URL or no key of a fleet"),
        (ENVIRONMENT, "", "has no URL or no key of a fleet"),
        (ENVIRONMENT, ACCESS.url.replace("6390", "99999"), "has no URL or no key of a fleet"),
    ],
)
def test_damaged_files_are_named_with_a_remedy(name: str, content: str | None, words: str, tmp_path: Path) -> None:
    save(ACCESS, tmp_path)
    if content is None:
        (tmp_path / name).unlink()
    else:
        (tmp_path / name).write_text(content)
    with pytest.raises(UsageError, match=f"{words}.*restore it, or remove {tmp_path} to begin with a new fleet"):
        saved(tmp_path)


def test_files_that_others_can_read_are_refused(tmp_path: Path) -> None:
    save(ACCESS, tmp_path)
    (tmp_path / ENVIRONMENT).chmod(0o640)
    with pytest.raises(UsageError, match="other users can read"):
        saved(tmp_path)


def test_the_folder_is_below_the_users_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relative XDG_STATE_HOME is ignored, as its specification says."""
    monkeypatch.setenv("HOME", "/home/me")
    for given in ("", "relative"):
        monkeypatch.setenv("XDG_STATE_HOME", given)
        assert state_folder("fleet") == Path("/home/me/.local/state/shadho_celery/fleet")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    assert state_folder("fleet") == tmp_path / "shadho_celery" / "fleet"


def test_a_folder_that_cannot_be_made_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(
            UsageError,
            match=r"cannot be written: Not a directory; make it writable, or name another folder in XDG_STATE_HOME",
        ),
        module.created(tmp_path / "file" / "folder"),
    ):
        pass
