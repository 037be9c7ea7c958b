"""Scheduler, Celery and the channel verify whom they talk to, alike, and by the same files."""

from __future__ import annotations

import ssl
from pathlib import Path

import kombu
import pytest
import redis

from shadho_celery.errors import UsageError
from shadho_celery.fleet.celery_settings import configuration
from shadho_celery.fleet.urls import CA, CERTIFICATE, KEY, remedy, tls


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CA, CERTIFICATE, KEY):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    found = {}
    for variable in (CA, CERTIFICATE, KEY):
        path = tmp_path / variable
        path.touch()
        monkeypatch.setenv(variable, str(path))
        found[variable] = str(path)
    return found


@pytest.mark.parametrize("url", ["amqp://h", "redis://h", "redis+socket:///s", "unix:///s", "amqp://u:amqps@h", ""])
def test_what_is_not_tls_stays_so(url: str, files: dict[str, str]) -> None:
    assert tls(url) == {}


def test_certificate_and_host_name_are_verified_unless_a_url_says_otherwise() -> None:
    assert tls("amqps://h") == {"cert_reqs": ssl.CERT_REQUIRED, "server_hostname": None}
    assert tls("rediss://h/0") == {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    client = redis.Redis.from_url("rediss://h/0", **tls("rediss://h/0"))
    made = client.connection_pool.connection_class(**client.connection_pool.connection_kwargs)
    assert (made.cert_reqs, made.check_hostname) == (ssl.CERT_REQUIRED, True)


def test_both_kinds_use_the_files_that_the_environment_names(files: dict[str, str]) -> None:
    names = {"ca_certs": files[CA], "certfile": files[CERTIFICATE], "keyfile": files[KEY]}
    assert names.items() <= tls("amqps://h").items()
    assert {f"ssl_{name}": path for name, path in names.items()}.items() <= tls("rediss://h/0").items()


def test_a_redis_url_that_names_files_speaks_for_itself_to_every_library(files: dict[str, str]) -> None:
    url = f"rediss://h/0?ssl_ca_certs={files[CA]}"
    assert tls(url) == {}
    assert kombu.Connection(url).ssl == {"ssl_ca_certs": files[CA]}
    assert redis.Redis.from_url(url).connection_pool.connection_kwargs["ssl_ca_certs"] == files[CA]


def test_celerys_settings_follow_from_the_broker_that_is_in_force(
    files: dict[str, str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("CELERY_BROKER_URL", "amqps://h")
    assert configuration()["broker_use_ssl"] == tls("amqps://h")
    monkeypatch.delenv("CELERY_BROKER_URL")
    (tmp_path / "celeryconfig.py").write_text("broker_url = 'rediss://h'")
    assert configuration()["broker_use_ssl"] == tls("rediss://h")
    (tmp_path / "celeryconfig.py").write_text("broker_url = 'amqps://h'\nbroker_use_ssl = {'ca_certs': 'mine'}")
    assert configuration()["broker_use_ssl"] == {"ca_certs": "mine"}
    (tmp_path / "celeryconfig.py").write_text("broker_url = 'amqp://h'")
    assert "broker_use_ssl" not in configuration()


def test_a_file_that_cannot_be_read_is_named_with_its_variable(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CA, "/nowhere/ca.pem")
    for url in ("amqps://h", "rediss://h"):
        with pytest.raises(UsageError, match=f"{CA}: /nowhere/ca.pem"):
            tls(url)


def test_a_key_needs_its_certificate(files: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CERTIFICATE)
    with pytest.raises(UsageError, match=CERTIFICATE):
        tls("amqps://h")


def test_an_amqps_url_takes_no_options_and_says_what_does() -> None:
    with pytest.raises(UsageError, match=CA):
        tls("amqps://h//?ssl_ca_certs=/ca.pem")


def test_the_remedy_fits_the_cause() -> None:
    assert CA in remedy("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed", "URL")
    assert CERTIFICATE in remedy("[SSL: TLSV13_ALERT_CERTIFICATE_REQUIRED] alert", "URL")
    assert remedy("Connection refused", "URL") == "start it, or check URL"
