"""The servers that tests can start: Redis, RabbitMQ, PostgreSQL; and how one is asked if it is up."""

from __future__ import annotations

import os
import pwd
import shutil
import subprocess
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import amqp
import redis
import sqlalchemy

from services.processes import Server, Unavailable, free_port, program

COMPOSE = Path(__file__).parents[2] / "deploy" / "compose.yml"


class RedisServer(Server):
    """Redis or Valkey with an append-only file: killed and restarted, it has everything it had answered for."""

    def __init__(self, conf: Path | None = None) -> None:
        self.binary = program("redis-server", "valkey-server")
        self.conf = conf
        super().__init__()
        self.url = f"redis://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        settings = {"port": str(self.port), "bind": "127.0.0.1", "save": "", "appendonly": "yes"}
        settings |= {"appendfsync": "everysec", "dir": str(self.folder), "maxmemory-policy": "noeviction"}
        conf = [str(self.conf)] if self.conf else []
        return [self.binary, *conf, *(word for name, value in settings.items() for word in (f"--{name}", value))]

    def check(self) -> object:
        return redis_answers(self.url)

    def restart_empty(self) -> None:
        """Kill it and start it again as if it had kept nothing."""
        self.kill()
        shutil.rmtree(self.folder / "appendonlydir")
        self.start()


class RabbitServer(Server):
    """A RabbitMQ node with its own epmd, beside any other node of the machine; `conf` is its rabbitmq.conf.

    `arguments` are Erlang's, for settings that no file has: ``-rabbit channel_tick_interval 2000``.
    """

    def __init__(self, conf: str = "", arguments: str = "") -> None:
        self.conf = conf
        self.arguments = arguments
        # Debian's wrapper insists on its own user; the script behind it runs as anybody.
        script = Path(program("rabbitmq-server"))
        self.scripts = script.resolve().parent if script.is_symlink() else script.parent
        if not (self.scripts / "rabbitmq-server").exists():
            raise Unavailable(f"no rabbitmq-server beside {script.resolve()}")
        self.epmd_binary = program("epmd")
        super().__init__()
        self.epmd_port = free_port()
        self.epmd: subprocess.Popen[bytes] | None = None
        self.url = f"amqp://guest:guest@127.0.0.1:{self.port}//"

    def environment(self) -> dict[str, str]:
        # All are given, or the machine's own would be read.
        for name, text in {"env.conf": "", "rabbitmq.conf": self.conf, "plugins": "[].\n"}.items():
            (self.folder / name).write_text(text)
        loopback = "{127,0,0,1}"
        return {
            name: value for name, value in self._inherited.items() if not name.startswith(("RABBITMQ_", "ERL_"))
        } | {
            "HOME": str(self.folder),  # the cookie lies there
            "ERL_EPMD_PORT": str(self.epmd_port),
            "ERL_EPMD_ADDRESS": "127.0.0.1",
            "ERL_FLAGS": f"-kernel inet_dist_use_interface {loopback}",
            "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": self.arguments,
            "RABBITMQ_NODENAME": f"shadho-{self.port}@localhost",
            "RABBITMQ_NODE_IP_ADDRESS": "127.0.0.1",
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(free_port()),
            "RABBITMQ_MNESIA_BASE": str(self.folder / "mnesia"),
            "RABBITMQ_LOG_BASE": str(self.folder / "logs"),
            "RABBITMQ_PID_FILE": str(self.folder / "pid"),
            "RABBITMQ_ENABLED_PLUGINS_FILE": str(self.folder / "plugins"),
            "RABBITMQ_CONFIG_FILE": str(self.folder / "rabbitmq.conf"),
            "RABBITMQ_CONFIG_FILES": str(self.folder / "none"),
            "RABBITMQ_CONF_ENV_FILE": str(self.folder / "env.conf"),
        }

    def command(self) -> list[str]:
        return [str(self.scripts / "rabbitmq-server")]

    def check(self) -> object:
        return amqp_answers(self.url)

    def ctl(self, *words: str) -> str:
        """Run rabbitmqctl against this node."""
        return rabbitmqctl(str(self.scripts / "rabbitmqctl"), words, self.environment())

    def _start(self) -> None:
        # Started here rather than by Erlang, whose own would outlive the node.
        if self.epmd is None:
            words = [self.epmd_binary, "-port", str(self.epmd_port), "-address", "127.0.0.1"]
            self.epmd = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL)
        super()._start()

    def stop(self) -> None:
        super().stop()
        if self.epmd is not None:
            self.epmd.kill()
            self.epmd.wait()
            self.epmd = None


class TlsRedisServer(RedisServer):
    """A Redis that speaks TLS only; with `clients` to those who have a certificate only. See `certificates`."""

    def __init__(self, *, clients: bool = False) -> None:
        super().__init__()
        self.clients = clients
        self.files = certificates(self.folder)
        self.url = f"rediss://127.0.0.1:{self.port}/0"

    def command(self) -> list[str]:
        settings = {"port": "0", "tls-port": str(self.port), "tls-auth-clients": "yes" if self.clients else "no"}
        settings |= {"tls-ca-cert-file": self.files["ca"], "tls-cert-file": self.files["cert"]}
        settings |= {"tls-key-file": self.files["key"]}
        return super().command() + [word for name, value in settings.items() for word in (f"--{name}", value)]

    def check(self) -> object:
        files = {"ssl_ca_certs": self.files["ca"], "ssl_certfile": self.files["cert"], "ssl_keyfile": self.files["key"]}
        return redis_answers(f"{self.url}?{urlencode(files)}")


class TlsRabbitServer(RabbitServer):
    """A RabbitMQ node that also has a listener for TLS, at `tls_url`; with `clients` as for Redis."""

    def __init__(self, *, clients: bool = False) -> None:
        super().__init__()
        self.files = certificates(self.folder)
        tls_port = free_port()
        options = {"cacertfile": self.files["ca"], "certfile": self.files["cert"], "keyfile": self.files["key"]}
        options |= {"verify": "verify_peer", "fail_if_no_peer_cert": "true"} if clients else {"verify": "verify_none"}
        lines = [f"listeners.ssl.1 = 127.0.0.1:{tls_port}"]
        self.conf = "\n".join(lines + [f"ssl_options.{name} = {value}" for name, value in options.items()]) + "\n"
        self.tls_url = f"amqps://guest:guest@127.0.0.1:{tls_port}//"


class PostgresServer(Server):
    """A PostgreSQL cluster of its own; it refuses to run as root, who lends it to another user."""

    def __init__(self) -> None:
        newest = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda path: float(path.parts[-3]))
        initdb = newest[-1] if newest else Path(program("initdb")).resolve()
        self.binaries = initdb.parent
        super().__init__()
        self.url = f"postgresql+psycopg://postgres@127.0.0.1:{self.port}/postgres"
        self.data = self.folder / "data"

    def credentials(self) -> dict[str, Any]:
        if os.geteuid() != 0:
            return {}
        users = {entry.pw_name: entry for entry in pwd.getpwall()}
        user = users.get("postgres") or users.get("nobody")
        if user is None:
            raise Unavailable("PostgreSQL does not run as root, and there is no user postgres or nobody")
        return {"user": user.pw_uid, "group": user.pw_gid, "extra_groups": []}

    def command(self) -> list[str]:
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off"}
        words = [word for name, value in settings.items() for word in ("-c", f"{name}={value}")]
        return [str(self.binaries / "postgres"), "-D", str(self.data), "-p", str(self.port), *words]

    def check(self) -> object:
        return postgres_answers(self.url)

    def _start(self) -> None:
        if not self.data.exists():
            credentials = self.credentials()
            if credentials:
                os.chown(self.folder, credentials["user"], credentials["group"])
            made = subprocess.run(
                [self.binaries / "initdb", "-D", self.data, "-U", "postgres", "-A", "trust", "-E", "UTF8", "-N"],
                cwd=self.folder,
                capture_output=True,
                text=True,
                check=False,
                **credentials,
            )
            if made.returncode != 0:
                raise Unavailable(f"initdb: {made.stderr.strip()[-300:]}")
        super()._start()


def certificates(folder: Path) -> dict[str, str]:
    """Make an authority, and a certificate of it for 127.0.0.1 that serves servers and clients; paths by kind."""
    openssl = program("openssl")
    files = {name: str(folder / f"{name}.pem") for name in ("ca", "ca-key", "cert", "key", "request")}
    names = folder / "names"
    names.write_text("subjectAltName=IP:127.0.0.1,DNS:localhost\n")
    new = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    issuer = ["-CA", files["ca"], "-CAkey", files["ca-key"], "-CAcreateserial", "-days", "2"]
    for words in (
        ["req", "-x509", *new, "-keyout", files["ca-key"], "-out", files["ca"], "-days", "2", "-subj", "/CN=authority"],
        ["req", *new, "-keyout", files["key"], "-out", files["request"], "-subj", "/CN=127.0.0.1"],
        ["x509", "-req", "-in", files["request"], *issuer, "-out", files["cert"], "-extfile", str(names)],
    ):
        done = subprocess.run([openssl, *words], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            raise Unavailable(f"openssl {words[0]}: {done.stderr.strip()[-300:]}")
    return files


def redis_answers(url: str) -> object:
    with redis.Redis.from_url(url, socket_connect_timeout=2) as client:
        return client.ping()


def amqp_answers(url: str) -> object:
    parts = urlsplit(url)
    host = f"{parts.hostname}:{parts.port or 5672}"
    vhost = parts.path[1:].replace("%2F", "/").replace("%2f", "/") or "/"
    user, password = parts.username or "guest", parts.password or "guest"
    with amqp.Connection(host, userid=user, password=password, virtual_host=vhost, connect_timeout=2):
        return True


def postgres_answers(url: str) -> object:
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool, connect_args={"connect_timeout": 2})
    with engine.connect() as connection:
        return connection.execute(sqlalchemy.text("select 1")).scalar() == 1


def rabbitmqctl(command: str, words: tuple[str, ...], environment: dict[str, str] | None = None) -> str:
    done = subprocess.run([command, "-q", *words], env=environment, capture_output=True, text=True, check=False)
    if done.returncode != 0:
        raise Unavailable(f"rabbitmqctl {words[0]}: {done.stderr.strip()[-300:]}")
    return done.stdout


def system_rabbitmqctl(*words: str) -> str:
    """Run the rabbitmqctl that belongs to the machine's own broker."""
    return rabbitmqctl(program("rabbitmqctl"), words)
