"""A Redis that cannot be used is refused at the connection, in one line with the cause."""

from __future__ import annotations

import socketserver
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import kombu
import pytest
from redis._parsers.base import BaseParser
from services.cases import cases

from shadho_celery.errors import ServiceError
from shadho_celery.fleet import limits
from shadho_celery.fleet.redis import OLDEST, Redis, connect, is_outage, refusals


class _Server(socketserver.ThreadingTCPServer):
    """Speaks RESP2, as a Redis of the version `version` and in the mode `mode`."""

    daemon_threads = True
    version = ""
    mode = "standalone"
    #: answer to commands that do not belong to the connection
    answer = "+OK\r\n"
    #: commands that came
    heard: list[bytes]


class _Handler(socketserver.StreamRequestHandler):
    def handle(self) -> None:
        while line := self.rfile.readline():
            words = []
            for _ in range(int(line[1:])):
                size = int(self.rfile.readline()[1:])
                words.append(self.rfile.read(size + 2)[:-2])
            self.wfile.write(self._answer(words).encode())

    def _answer(self, words: list[bytes]) -> str:
        server = self.server
        assert isinstance(server, _Server)
        server.heard.append(words[0].upper())
        if words[0].upper() == b"CLIENT":
            return "+OK\r\n"
        if words[0].upper() != b"HELLO":
            return "+PONG\r\n" if words[0].upper() == b"PING" else server.answer
        if server.version.startswith(("2.", "5.")):
            return "-ERR unknown command `HELLO`, with args beginning with:\r\n"
        proto = words[1].decode() if len(words) > 1 else "2"
        facts = {"server": "redis", "version": server.version, "mode": server.mode}
        head = f"%{len(facts) + 1}" if proto == "3" else f"*{2 * len(facts) + 2}"
        texts = "".join(f"${len(each)}\r\n{each}\r\n" for pair in facts.items() for each in pair)
        return f"{head}\r\n{texts}$5\r\nproto\r\n:{proto}\r\n"


@contextmanager
def played(version: str, mode: str = "standalone", answer: str = _Server.answer) -> Iterator[_Server]:
    with _Server(("127.0.0.1", 0), _Handler) as server:
        server.version, server.mode, server.answer, server.heard = version, mode, answer, []
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.shutdown()


def url(server: _Server) -> str:
    return f"redis://127.0.0.1:{server.server_address[1]}/0"


@pytest.mark.parametrize("version", ["2.8.17", "5.0.14", "6.0.0", "6.0.16"])
def test_a_redis_that_lacks_our_commands_is_refused_naming_the_version_that_is_needed(version: str) -> None:
    with played(version) as server, pytest.raises(ServiceError, match=r"version is .*; Redis 6\.2") as refused:
        connect(url(server))
    assert "\n" not in str(refused.value)


def test_a_redis_cluster_is_refused_as_what_it_is() -> None:
    with played("7.2.4", "cluster") as server, pytest.raises(ServiceError, match=r"Redis Cluster.*not supported"):
        connect(url(server))


class _Other(socketserver.StreamRequestHandler):
    """Another program, which answers `answer` to whatever comes."""

    answer = b""

    def handle(self) -> None:
        with suppress(ConnectionError):
            while self.rfile.readline():
                self.wfile.write(self.answer)


@cases(
    "answer", [b"+OK\r\n", b":7\r\n", b"$-1\r\n", b"*2\r\n:1\r\n:2\r\n", b"*1\r\n*0\r\n", b"HTTP/1.1 400 Bad\r\n\r\n"]
)
@cases("query", ["", "?protocol=3"])
def test_another_program_at_the_port_is_refused_in_one_line(answer: bytes, query: str) -> None:
    kind = type("Kind", (_Other,), {"answer": answer})
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), kind) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        at = f"redis://127.0.0.1:{server.server_address[1]}/0{query}"
        with pytest.raises(ServiceError, match="cannot be used") as refused:
            connect(at)
        # If Redis is the broker too.
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(limits, "configured", lambda: kombu.Connection(at.partition("?")[0]))
            with pytest.raises(ServiceError, match="cannot be used"):
                limits.broker_facts()
        server.shutdown()
    assert "\n" not in str(refused.value)


#: an answer, and commands that Redis never answers so
NONSENSE = [
    ("+OK\r\n", ["mget k", "exists k", "time", "xread"]),
    (":7\r\n", ["get k", "hgetall k", "smembers k", "mget k", "info", "time", "xread"]),
    ("$-1\r\n", ["mget k", "info", "time", "pttl k", "delete k", "type k"]),
    ("*2\r\n:1\r\n:2\r\n", ["get k", "smembers k", "mget k", "info"]),
    ("*1\r\n*0\r\n", ["get k", "smembers k", "mget k", "info", "time"]),
    ("HTTP/1.1 400 Bad\r\n\r\n", ["get k", "hgetall k", "info"]),
]


@cases("answer, commands", NONSENSE)
@cases("query", ["", "?protocol=3"])
@cases("is_in_pipeline", [False, True])
def test_nonsense_after_a_correct_greeting_is_an_error_of_redis_and_an_outage(
    answer: str, commands: list[str], query: str, is_in_pipeline: bool
) -> None:
    for words in map(str.split, commands):
        with played("7.0.15", answer=answer) as server, connect(url(server) + query) as client:
            with pytest.raises(ServiceError, match="Redis cannot be used at the moment") as refused:
                _ask(client, words, is_in_pipeline=is_in_pipeline)
            assert isinstance(refused.value.__cause__, Exception)
            assert is_outage(refused.value.__cause__)


def _ask(client: Redis, words: list[str], *, is_in_pipeline: bool) -> None:
    with refusals():
        to = client.pipeline(transaction=False) if is_in_pipeline else client
        getattr(to, words[0])(*[{"k": "0"}] if words[0] == "xread" else words[1:])
        if is_in_pipeline:
            to.execute()


@pytest.mark.parametrize("version", [".".join(map(str, OLDEST)), "6.2.14", "7.0.15", "8.0.1", "10.1.0"])
def test_a_redis_of_our_commands_is_taken(version: str) -> None:
    with played(version) as server, connect(url(server)) as client:
        assert server.heard.count(b"PING") == 0
        assert client.ping()


@pytest.mark.parametrize(
    "url",
    [
        "redis://127.0.0.1:abc",
        "redis://127.0.0.1:99999",
        "redis://[::1",
        "rediss://[::1",
        ";",
        "http://x",
        "redis://127.0.0.1?nosuch=1",
        "redis://127.0.0.1?socket_timeout=abc",
    ],
)
def test_a_redis_url_that_cannot_be_read_is_refused_in_one_line(url: str) -> None:
    with pytest.raises(ServiceError, match="check SHADHO_REDIS_URL") as refused:
        connect(url)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("path", ["x", "0x1", "-1", "0/1"])
def test_a_path_that_is_no_number_of_a_database_is_refused(path: str) -> None:
    with pytest.raises(ServiceError, match="is not the number of a database"):
        connect(f"redis://127.0.0.1:1/{path}")


#: answers of a server that passes, as it writes them: plain, and from inside a script
PASSING = [
    "NOPERM this user has no permissions to run the 'evalsha' command",
    "READONLY You can't write against a read only replica.",
    "LOADING Redis is loading the dataset in memory",
    "MASTERDOWN Link with MASTER is down and replica-serve-stale-data is set to 'no'.",
    "OOM command not allowed when used memory > 'maxmemory'.",
    "BUSY Redis is busy running a script.",
    "CLUSTERDOWN Hash slot not served",
    "TRYAGAIN Multiple keys request during rehashing of slot",
    "MISCONF Redis is configured to save RDB snapshots",
    "NOREPLICAS Not enough good replicas to write.",
    "NOAUTH Authentication required.",
    "WRONGPASS invalid username-password pair or user is disabled.",
    "UNBLOCKED force unblock from blocking operation, instance state changed (master -> replica?)",
    "ERR max number of clients reached",
    "ERR Error running script (call to f_0): @user_script:5: -OOM command not allowed",
    "ERR Error running script (call to f_0): @user_script:5: -READONLY You can't write",
    "ERR The user executing the script can't run this command or subcommand script: 0, on @user_script:1.",
    "ERR ACL failure in script: User new has no permissions to run the 'set' command script: 0",
]


@cases("said", PASSING)
@cases("is_in_pipeline", [False, True])
def test_a_server_that_denies_a_command_for_now_is_an_outage(said: str, is_in_pipeline: bool) -> None:
    """A results' sender keeps them; redis-py leaves the codes that it knows out of the text."""
    error = BaseParser.parse_error(said)
    if is_in_pipeline:
        error = type(error)(f"Command # 1 (SADD a b) of pipeline caused error: {error}")
    assert is_outage(error)


@pytest.mark.parametrize("said", ["ERR unknown command 'XADDD'", "ERR value is not an integer", "NOGROUP No such key"])
def test_an_error_that_does_not_pass_is_none(said: str) -> None:
    assert not is_outage(BaseParser.parse_error(said))
    inside = f"Command # 1 (SET READONLY OOM) of pipeline caused error: {said}"
    assert not is_outage(type(BaseParser.parse_error(said))(inside))
