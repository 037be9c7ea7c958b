"""The services that the other tests are lent: they work, and what one test does in them no other test sees."""

from __future__ import annotations

import contextlib
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import kombu
import pytest
import redis
import services
import sqlalchemy
from services import lending


def test_a_redis_database_is_lent_empty_and_to_one_test_at_a_time(
    private_redis: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lending.REDIS_VARIABLE, private_redis.url)
    with services.redis_db(private_redis.url) as first, services.redis_db(private_redis.url) as second:
        assert first != second
        with redis.Redis.from_url(first) as one, redis.Redis.from_url(second) as other:
            one.set("key", "value")
            assert other.get("key") is None
    with redis.Redis.from_url(first) as one:
        assert one.keys() == [services.MARK.encode()]


def test_a_database_is_lent_again_although_a_process_wrote_to_it_after_its_test(
    private_redis: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lending.REDIS_VARIABLE, private_redis.url)
    # One that no other test holds.
    monkeypatch.setattr(lending, "TEST_DBS", range(8, 9))
    monkeypatch.setattr(lending, "LENT_SECONDS", 1.0)
    with services.redis_db(private_redis.url) as url:
        pass
    with redis.Redis.from_url(url) as late:
        late.set("late", "1")
    with services.redis_db(private_redis.url) as url, redis.Redis.from_url(url) as again:
        assert again.get("late") is None


def test_a_database_that_a_left_worker_still_uses_is_not_lent(
    private_redis: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lending.REDIS_VARIABLE, private_redis.url)
    with services.redis_db(private_redis.url) as url:
        pass
    with redis.Redis.from_url(url) as left:
        left.ping()
        with services.redis_db(private_redis.url) as other:
            assert other != url


@pytest.fixture
def used_redis(private_redis: services.RedisServer) -> services.RedisServer:
    """A Redis whose databases for tests all hold somebody's data."""
    for number in services.TEST_DBS:
        with redis.Redis.from_url(private_redis.url.replace("/0", f"/{number}")) as client:
            client.set("precious", "1")
    return private_redis


def precious(server: services.RedisServer) -> list[bytes | None]:
    """Return what is left of somebody's data."""
    with contextlib.ExitStack() as stack:
        urls = [server.url.replace("/0", f"/{number}") for number in services.TEST_DBS]
        return [stack.enter_context(redis.Redis.from_url(url)).get("precious") for url in urls]


def test_where_all_databases_hold_somebodys_data_a_private_redis_is_lent(
    used_redis: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(lending.REDIS_VARIABLE, raising=False)
    with services.redis_db(used_redis.url) as url:
        assert f":{used_redis.port}/" not in url
        with redis.Redis.from_url(url) as client:
            assert client.ping()
            assert client.dbsize() == 0
    assert precious(used_redis) == [b"1"] * len(services.TEST_DBS)


def test_a_redis_that_is_named_and_used_by_somebody_has_no_other_beside_it(
    used_redis: services.RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(lending.REDIS_VARIABLE, used_redis.url)
    monkeypatch.setenv("CI", "true")
    monkeypatch.setattr(lending, "LENT_SECONDS", 1.0)
    with pytest.raises(pytest.fail.Exception, match="all in use"), services.redis_db(used_redis.url):
        pass
    assert precious(used_redis) == [b"1"] * len(services.TEST_DBS)


def test_streams_work_in_the_lent_database(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url, decode_responses=True) as client:
        client.xadd("stream", {"loss": "0.5"})
        [(_, fields)] = client.xrange("stream")
        assert fields == {"loss": "0.5"}


def test_a_message_published_to_the_lent_broker_is_delivered(amqp_url: str, unique: Callable[[str], str]) -> None:
    with kombu.Connection(amqp_url) as connection:
        queue = connection.SimpleQueue(unique("hello"))
        queue.put({"trial": 1})
        message = queue.get(timeout=5)
        assert message.payload == {"trial": 1}
        message.ack()
        queue.close()
        queue.queue.delete()


def test_two_virtual_hosts_do_not_see_each_others_queues(private_rabbitmq: services.RabbitServer) -> None:
    lend = services.amqp_vhost
    node = private_rabbitmq
    with lend(node.url, node.ctl) as first, lend(node.url, node.ctl) as second:
        assert first != second
        with kombu.Connection(first) as connection:
            kombu.Queue("seen")(connection.default_channel).declare()
        with kombu.Connection(second) as connection, pytest.raises(connection.channel_errors, match="no queue 'seen'"):
            kombu.Queue("seen")(connection.default_channel).queue_declare(passive=True)
    assert "shadho-test-" not in node.ctl("list_vhosts")


def test_a_broker_whose_rabbitmqctl_is_not_ours_is_lent_as_it_is() -> None:
    def refused(*words: str) -> str:
        raise services.Unavailable(words[0])

    url = "amqp://somebody:secret@broker.example//"
    with services.amqp_vhost(url, refused) as lent:
        assert lent == url


def test_a_postgres_database_is_lent_fresh_and_dropped_with_its_connections(postgres_server: str) -> None:
    with services.postgres_database(postgres_server) as url:
        engine = sqlalchemy.create_engine(url)
        left_open = engine.connect()
        left_open.execute(sqlalchemy.text("create table trials (id integer)"))
        left_open.commit()
        assert sqlalchemy.inspect(engine).get_table_names() == ["trials"]
    with pytest.raises(sqlalchemy.exc.OperationalError):
        services.postgres_answers(url)
    left_open.invalidate()
    left_open.close()
    engine.dispose()


def test_a_private_postgres_starts_and_leaves_nothing(no_orphans: None) -> None:
    with services.private(services.PostgresServer) as server, services.postgres_database(server.url) as url:
        assert services.postgres_answers(url)
    assert not server.folder.exists()


def test_a_killed_private_redis_comes_back_with_its_data(no_orphans: None, private_redis: services.RedisServer) -> None:
    with redis.Redis.from_url(private_redis.url) as client:
        client.set("kept", "1")
        private_redis.kill()
        with pytest.raises(redis.ConnectionError):
            client.ping()
        private_redis.restart()
        assert client.get("kept") == b"1"


def test_a_killed_private_rabbitmq_comes_back_with_its_messages(private_rabbitmq: services.RabbitServer) -> None:
    with kombu.Connection(private_rabbitmq.url, transport_options={"confirm_publish": True}) as connection:
        connection.SimpleQueue("kept").put({"trial": 1})
    private_rabbitmq.restart()
    with kombu.Connection(private_rabbitmq.url) as connection:
        assert connection.SimpleQueue("kept").get(timeout=5).payload == {"trial": 1}


def test_the_environment_comes_first_then_the_standard_port_then_a_private_server(
    monkeypatch: pytest.MonkeyPatch, no_orphans: None, private_redis: services.RedisServer
) -> None:
    def find(*standard: str) -> tuple[str, object]:
        with services.service("SHADHO_TEST_URL", standard, services.redis_answers, services.RedisServer) as found:
            services.redis_answers(found[0])
            return found

    nowhere = f"redis://127.0.0.1:{services.free_port()}/0"
    url, server = find(nowhere)
    assert isinstance(server, services.RedisServer)
    assert url == server.url
    assert find(nowhere, private_redis.url) == (private_redis.url, None)
    monkeypatch.setenv("SHADHO_TEST_URL", private_redis.url + "?named")
    assert find(private_redis.url) == (private_redis.url + "?named", None)
    monkeypatch.setenv("SHADHO_TEST_URL", nowhere)
    with pytest.raises(redis.ConnectionError):
        find(private_redis.url)


def test_real_servers_accept_the_configuration_of_deploy(private_rabbitmq: services.RabbitServer) -> None:
    assert "1209600000" in private_rabbitmq.ctl("eval", "application:get_env(rabbit, consumer_timeout).")
    conf = services.COMPOSE.parent / "redis" / "redis.conf"
    with (
        services.private(lambda: services.RedisServer(conf)) as server,
        redis.Redis.from_url(server.url) as client,
    ):
        assert client.config_get("tcp-keepalive") == {"tcp-keepalive": "30"}
        assert client.config_get("maxmemory-policy") == {"maxmemory-policy": "noeviction"}


def test_a_missing_service_skips_on_a_laptop_and_fails_in_ci(monkeypatch: pytest.MonkeyPatch) -> None:
    def absent() -> services.Server:
        raise services.Unavailable("not installed")

    monkeypatch.delenv("CI", raising=False)
    with pytest.raises(pytest.skip.Exception, match="not installed"), services.private(absent):
        pass
    monkeypatch.setenv("CI", "true")
    with pytest.raises(pytest.fail.Exception, match="not installed"), services.private(absent):
        pass


def test_a_process_left_behind_is_found_by_its_mark(monkeypatch: pytest.MonkeyPatch) -> None:
    if not Path("/proc/self/environ").exists():
        pytest.skip("processes are found in /proc")
    monkeypatch.setenv(services.MARK, "of-this-test")
    with tempfile.TemporaryFile() as log:
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stdout=log)
    try:
        services.wait_until(lambda: child.pid in dict(services.marked_processes("of-this-test")))
    finally:
        child.kill()
        child.wait()
    assert not services.marked_processes("of-this-test")
