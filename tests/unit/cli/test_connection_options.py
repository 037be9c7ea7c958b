"""Where broker and Redis are comes from the command line, a file or the environment; passwords are not shown."""

from __future__ import annotations

from pathlib import Path

import click
import pytest
from click.testing import CliRunner
from services.cases import cases

from shadho_celery.cli.shared_options import environment, on_fleet, refusal, warn_of_password
from shadho_celery.core.checks import mask
from shadho_celery.errors import NoSuccessfulTrial, UsageError
from shadho_celery.fleet.signing import KEY_FILE
from shadho_celery.fleet.urls import BROKER, DEFAULTS, OWN_BROKER, REDIS, is_fleet, prefer_own, url


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (BROKER, OWN_BROKER, REDIS, KEY_FILE):
        monkeypatch.delenv(name, raising=False)


@cases(
    "shown, masked",
    [
        ("amqp://127.0.0.1", "amqp://127.0.0.1"),
        ("redis://127.0.0.1:6379/0", "redis://127.0.0.1:6379/0"),
        ("amqp://me@host/vhost", "amqp://me@host/vhost"),
        ("amqp://me:secret@host:5672/vhost", "amqp://me:***@host:5672/vhost"),
        ("redis://:secret@host/0", "redis://:***@host/0"),
        ("rediss://me:se:cret@host/0", "rediss://me:***@host/0"),
        ("amqp://me:sec@ret@host//", "amqp://me:***@host//"),
        ("amqp://me:sec/ret@host//", "amqp://me:***@host//"),
        ("amqp://me:sec#r?et@host//", "amqp://me:***@host//"),
        ("redis+socket:///run/redis.sock", "redis+socket:///run/redis.sock"),
        ("redis://host/0?db=1", "redis://host/0?db=1"),
        ("redis://host/0?password=secret&db=1", "redis://host/0?password=***"),
        ("unix:///run/redis.sock?db=1&password=secret", "unix:///run/redis.sock?db=1&password=***"),
        ("amqp://a:secret@one//;amqp://b:secret@two//", "amqp://a:***@two//"),
        ("amqp://one:5672//;amqp://two:5672//", "amqp://one:5672//;amqp://two:5672//"),
        (
            "postgresql://me@host/db?sslmode=require&password=secret",
            "postgresql://me@host/db?sslmode=require&password=***",
        ),
        ("postgresql://me@corp:secret@host/db", "postgresql://me@corp:***@host/db"),
        ("me:secret@host", "me:***@host"),
        ("sqlite:////home/a:b@c/shadho.db", "sqlite:////home/a:b@c/shadho.db"),
        ("", ""),
    ],
)
def test_a_masked_url_shows_everything_but_the_password(shown: str, masked: str) -> None:
    assert mask(shown) == masked


def test_the_command_line_comes_before_the_file(tmp_path: Path) -> None:
    file = tmp_path / "fleet.urls"
    file.write_text(f"# our fleet\n\n{BROKER} = amqp://file\n  {REDIS}=redis://file/0?a=b\n  # indented\n")
    of_file = {BROKER: "amqp://file", OWN_BROKER: "amqp://file", REDIS: "redis://file/0?a=b"}
    assert environment(None, None, str(file)) == of_file
    of_line = {BROKER: "amqp://line", OWN_BROKER: "amqp://line"}
    assert environment("amqp://line", None, str(file)) == of_file | of_line
    assert environment(None, "redis://line", None) == {REDIS: "redis://line"}
    assert environment(None, None, None) == {}


@cases("words", [("--broker", "amqp://host", "--redis", "redis://host"), ("--url-file", "fleet.urls")])
def test_options_override_both_variables_and_do_not_reach_the_next_call(
    words: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    @click.command()
    @on_fleet
    def named() -> None:
        prefer_own()  # again, as at the import of the Celery application
        click.echo(f"{url(BROKER)} {url(REDIS)}")

    monkeypatch.chdir(tmp_path)
    Path("fleet.urls").write_text(f"{BROKER}=amqp://host\n{REDIS}=redis://host\n")
    monkeypatch.setenv(BROKER, "amqp://another-application")
    monkeypatch.setenv(OWN_BROKER, "amqp://ours")
    assert CliRunner().invoke(named, words).output == "amqp://host redis://host\n"
    assert CliRunner().invoke(named).output == f"amqp://ours {DEFAULTS[REDIS]}\n"


def test_a_password_on_the_command_line_is_warned_of_and_not_repeated(capsys: pytest.CaptureFixture[str]) -> None:
    found = environment("amqp://me:secret@host//", "redis://:secret@host/0", None)
    assert (found[BROKER], found[REDIS]) == ("amqp://me:secret@host//", "redis://:secret@host/0")
    out, err = capsys.readouterr()
    assert out == ""
    assert "--broker" in err
    assert "--redis" in err
    assert "--url-file" in err
    assert "secret" not in err


def test_urls_without_a_password_and_those_from_a_file_are_not_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    file = tmp_path / "fleet.urls"
    file.write_text(f"{BROKER}=amqp://me:secret@host//\n")
    file.chmod(0o600)
    environment(None, "redis://host/0", str(file))
    file.write_text(f"{BROKER}=amqp://me@host//\n")
    file.chmod(0o644)
    environment(None, None, str(file))
    assert capsys.readouterr() == ("", "")


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o644])
def test_a_file_that_shows_its_passwords_to_others_is_warned_of(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, mode: int
) -> None:
    file = tmp_path / "fleet.urls"
    file.write_text(f"{BROKER}=amqp://host//\n{REDIS}=redis://:secret@host/0\n")
    file.chmod(mode)
    assert environment(None, None, str(file))[REDIS] == "redis://:secret@host/0"
    _, err = capsys.readouterr()
    assert f"chmod 600 {file}" in err
    assert "secret" not in err


def test_the_signing_key_is_named_to_children_by_its_full_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "shadho.key").write_text("0123456789abcdef")
    (tmp_path / "shadho.key").chmod(0o600)
    assert environment(None, None, None, "shadho.key") == {KEY_FILE: str(tmp_path / "shadho.key")}


def test_a_signing_key_that_cannot_be_used_is_refused_at_once_however_it_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    missing = str(tmp_path / "missing.key")
    with pytest.raises(UsageError, match=missing):
        environment(None, None, None, missing)
    monkeypatch.setenv(KEY_FILE, missing)
    with pytest.raises(UsageError, match=missing):
        environment(None, None, None)


@pytest.mark.parametrize("line", ["amqp://me:secret@host", "PASSWORD=secret", "SHADHO_REDIS=redis://:secret@h"])
def test_a_line_that_is_not_understood_is_refused_by_its_number_without_showing_it(tmp_path: Path, line: str) -> None:
    file = tmp_path / "fleet.urls"
    file.write_text(f"# one\n{line}\n")
    with pytest.raises(UsageError, match="line 2 of") as caught:
        environment(None, None, str(file))
    assert "secret" not in str(caught.value)
    assert "\n" not in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe\x00")
    for path in (tmp_path / "missing", tmp_path, binary):
        with pytest.raises(UsageError, match=str(path)):
            environment(None, None, str(path))


def test_the_users_home_is_understood(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "fleet.urls").write_text(f"{REDIS}=redis://home\n")
    assert environment(None, None, "~/fleet.urls") == {REDIS: "redis://home"}


def test_the_url_in_force_is_the_environments_else_the_default(monkeypatch: pytest.MonkeyPatch) -> None:
    assert url(BROKER) == DEFAULTS[BROKER] == "amqp://127.0.0.1"
    assert url(REDIS) == DEFAULTS[REDIS] == "redis://127.0.0.1/0"
    monkeypatch.setenv(REDIS, "redis://elsewhere/3")
    assert url(REDIS) == "redis://elsewhere/3"


def test_a_study_runs_on_the_fleet_where_either_url_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert not is_fleet({})
    assert is_fleet({BROKER: "amqp://host"})
    assert is_fleet({REDIS: "redis://host"})
    monkeypatch.setenv(REDIS, "")
    assert not is_fleet({})
    monkeypatch.setenv(BROKER, "amqp://host")
    assert is_fleet({})


def test_an_error_is_shown_in_one_line_with_its_own_exit_code() -> None:
    shown = refusal(UsageError("first\n  second"))
    assert isinstance(shown, click.ClickException)
    assert (shown.message, shown.exit_code) == ("first second", 2)
    assert refusal(NoSuccessfulTrial()).exit_code == 1


@pytest.mark.parametrize(("store", "warned"), [("postgresql://me:secret@db/x", True), ("postgresql://me@db/x", False)])
def test_a_password_on_the_command_line_is_warned_of(
    capsys: pytest.CaptureFixture[str], store: str, warned: bool
) -> None:
    warn_of_password("--store", store, "PGPASSWORD")
    said = capsys.readouterr().err
    assert ("--store shows its password to all users of this machine; better in PGPASSWORD" in said) == warned
    assert "secret" not in said
