"""The settings in force are the package's, overridden one by one by the working directory's own."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path

import pytest
from celery import Celery
from celery.app.defaults import DEFAULTS

from shadho_celery.errors import UsageError
from shadho_celery.fleet.celery_settings import configuration

ROOT = Path(__file__).parents[3]


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (
        "CELERY_BROKER_URL",
        "SHADHO_REDIS_URL",
        "SHADHO_IMPORTS",
        "SHADHO_REMOTE_CONTROL",
        "SHADHO_IGNORE_CELERYCONFIG",
    ):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working directory without a celeryconfig.py."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_without_a_file_of_its_own_a_folder_has_the_packages_settings(elsewhere: Path) -> None:
    settings = configuration()
    assert settings["broker_url"] == "amqp://127.0.0.1"
    assert settings["shadho_redis_url"] == "redis://127.0.0.1/0"
    assert settings["worker_pool"] == "threads"
    assert settings["accept_content"] == ["json"]
    assert settings["task_acks_late"] is True
    assert settings["worker_prefetch_multiplier"] == 1


def test_a_celeryconfig_in_the_working_directory_overrides_single_settings(elsewhere: Path) -> None:
    before = configuration()
    (elsewhere / "celeryconfig.py").write_text(
        "worker_prefetch_multiplier = 7\nbroker_heartbeat = 99\nshadho_imports = ['x']\nhelper = 'y'\n"
    )
    settings = configuration()
    assert before.keys() <= settings.keys()
    changed = {name for name in settings if settings[name] != before.get(name)}
    assert changed == {"worker_prefetch_multiplier", "broker_heartbeat", "shadho_imports"}
    assert settings["worker_prefetch_multiplier"] == 7


def test_the_checkouts_own_file_is_the_packages(monkeypatch: pytest.MonkeyPatch, elsewhere: Path) -> None:
    away = configuration()
    monkeypatch.chdir(ROOT)
    here = configuration()
    assert {name for name in here if here[name] != away.get(name)} == {"shadho_imports"}


def test_what_trials_depend_on_is_not_overridden_and_this_is_said_by_name(elsewhere: Path) -> None:
    before = configuration()
    (elsewhere / "celeryconfig.py").write_text(
        "accept_content = ['pickle']\ntask_serializer = 'json'\nworker_pool = 'prefork'\nimports = ['a']\n"
        "task_routes = {}\nresult_backend = 'rpc://'\nbeat_schedule = {}\nworker_enable_remote_control = True\n"
        "broker_read_url = 'amqp://elsewhere'\n"
    )
    names = (
        "accept_content, beat_schedule, broker_read_url, imports, result_backend, task_routes, "
        "worker_enable_remote_control, worker_pool,"
    )
    with pytest.warns(
        UserWarning, match=f"celeryconfig.py is used without its settings {names}.*SHADHO_IGNORE_CELERYCONFIG=1"
    ):
        assert configuration() == before


def test_a_copy_of_the_packages_file_says_nothing_new(elsewhere: Path) -> None:
    before = configuration()
    shutil.copy(ROOT / "celeryconfig.py", elsewhere)
    assert configuration() == before


def test_the_environment_precedes_a_file_which_then_describes_another_broker(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "celeryconfig.py").write_text(
        "broker_url = 'redis://theirs'\nbroker_use_ssl = True\nbroker_transport_options = {'global_keyprefix': 'x'}\n"
        "shadho_redis_url = 'redis://theirs'\nshadho_imports = ['theirs']\nworker_concurrency = 3\n"
    )
    for name, value in (("CELERY_BROKER_URL", "redis://o"), ("SHADHO_REDIS_URL", "redis://r"), ("SHADHO_IMPORTS", "m")):
        monkeypatch.setenv(name, value)
    settings = configuration()
    monkeypatch.setenv("SHADHO_IGNORE_CELERYCONFIG", "1")
    plain = configuration()
    assert {name for name in settings if settings[name] != plain.get(name)} == {"worker_concurrency"}
    assert (plain["broker_url"], plain["shadho_redis_url"], plain["shadho_imports"]) == (
        "redis://o",
        "redis://r",
        ["m"],
    )


@pytest.mark.parametrize(
    ("text", "what"),
    [
        ("import os\nimport nothing_of_that_name", r"ModuleNotFoundError: .*nothing_of_that_name.* line 2: import"),
        ("broker_url = (", r"SyntaxError: .*celeryconfig.py, line 1"),
        ("1 / 0", r"ZeroDivisionError: .*line 1: 1 / 0"),
        ("raise SystemExit(3)", r"SystemExit: 3 .*line 1"),
        ("\0", r"(SyntaxError|ValueError): .*null bytes"),
        ("broker_url = ['amqp://a']", r"broker_url of celeryconfig.py is not a text"),
        ("broker_url = 'http://a'", r"broker_url of celeryconfig.py begins with http://"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name_unless_it_is_not_to_be_read(
    text: str, what: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (elsewhere / "celeryconfig.py").write_text(text)
    with pytest.raises(UsageError, match=what) as refused:
        configuration()
    assert "celeryconfig.py" in str(refused.value)
    assert "\n" not in str(refused.value)
    monkeypatch.setenv("SHADHO_IGNORE_CELERYCONFIG", "1")
    assert configuration()["broker_url"] == "amqp://127.0.0.1"


def test_the_environment_says_where_broker_redis_and_studies_are(
    monkeypatch: pytest.MonkeyPatch, elsewhere: Path
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "redis://b/1")
    monkeypatch.setenv("SHADHO_REDIS_URL", "redis://r/2")
    monkeypatch.setenv("SHADHO_IMPORTS", "my_study, tasks.svm,,")
    settings = configuration()
    assert (settings["broker_url"], settings["shadho_redis_url"]) == ("redis://b/1", "redis://r/2")
    assert settings["shadho_imports"] == ["my_study", "tasks.svm"]


def test_in_a_checkout_the_tasks_there_may_run_elsewhere_none(elsewhere: Path) -> None:
    assert configuration()["shadho_imports"] == []
    (elsewhere / "tasks").mkdir()
    for name in ("__init__", "b", "a"):
        (elsewhere / "tasks" / f"{name}.py").touch()
    assert configuration()["shadho_imports"] == ["tasks.a", "tasks.b"]


def test_only_settings_are_taken_from_a_file_and_not_what_it_imports_or_defines(elsewhere: Path) -> None:
    (elsewhere / "celeryconfig.py").write_text(
        "import os\nfrom pathlib import Path\n_private = 1\nCONSTANT = 2\nclass local: pass\nbroker_heartbeat = 99\n"
    )
    settings = configuration()
    assert settings["broker_heartbeat"] == 99
    assert not {"os", "Path", "_private", "CONSTANT", "local"} & settings.keys()


def test_celery_takes_every_setting(elsewhere: Path) -> None:
    settings = configuration()
    app = Celery("test", set_as_current=False)
    app.conf.update(settings)
    assert {name: app.conf[name] for name in settings} == settings
    # Celery ignores a name that it does not know.
    assert {name for name in settings.keys() - DEFAULTS.keys() if not name.startswith("shadho_")} == set()


def test_a_broker_of_no_kind_that_there_is_is_refused(elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "http://me:secret@broker")
    with pytest.raises(UsageError, match="begins with http://, which is not a broker") as refused:
        configuration()
    assert "secret" not in str(refused.value)


def test_celerys_remote_control_which_knows_no_key_is_off_unless_the_environment_asks_for_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert configuration()["worker_enable_remote_control"] is False
    monkeypatch.setenv("SHADHO_REMOTE_CONTROL", "1")
    assert configuration()["worker_enable_remote_control"] is True


@pytest.mark.parametrize("place", ["amqp://me:{}@host//", "redis://:{}@host/0", "redis://host/0?password={}"])
def test_a_broker_whose_password_spoils_its_url_is_refused_without_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    for character in "/?#[;" if ":{}@" in place else "x":
        monkeypatch.setenv("CELERY_BROKER_URL", place.format(f"s3q{character}w8x"))
        with pytest.raises(UsageError, match="CELERY_BROKER_URL") as refused:
            configuration()
        assert not any(part in str(refused.value) for part in ("s3q", "w8x"))


@pytest.mark.parametrize(
    "url",
    [
        "amqp://127.0.0.1:abc",
        "amqp://me:secret@127.0.0.1:99999",
        "redis://127.0.0.1:-1/0",
        "amqp://[::1",
        "amqps://[::1",
        ";",
        "amqp://127.0.0.1;",
        "amqp://127.0.0.1;amqp://127.0.0.2:abc",
        "amqp://me:secret#1@127.0.0.1",
        "amqp://me:secret/1@127.0.0.1",
    ],
)
def test_a_broker_url_that_cannot_be_read_is_refused_in_one_line_without_its_password(
    url: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    with pytest.raises(UsageError, match=r"CELERY_BROKER_URL is not a URL: .*HOST:PORT") as refused:
        configuration()
    assert "\n" not in str(refused.value)
    assert "secret" not in str(refused.value)


@pytest.mark.parametrize(
    "url", ["amqp://", "127.0.0.1", "amqp://[::1]:5672//", "amqp://a:1;amqp://b", "redis+socket:///a/b.sock"]
)
def test_a_broker_url_that_kombu_can_read_is_taken(url: str, elsewhere: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    assert configuration()["broker_url"] == url


def test_a_broker_whose_library_is_not_installed_is_refused_naming_it(
    elsewhere: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CELERY_BROKER_URL", "sqs://x")
    monkeypatch.setitem(sys.modules, "kombu.transport.SQS", None)
    with pytest.raises(UsageError, match=r"begins with sqs://, whose library is missing .*SQS"):
        configuration()
