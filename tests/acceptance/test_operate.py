"""The operator's book, deploy/OPERATE.md: its commands run in their order, on a copy of this machine.

Each block of commands is run by the user whom its first line names. All machines of the book are this one. What needs
the network is left out: packages are not installed, but must be here. So is the benchmark, which runs by itself.
"""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from pathlib import Path

import pytest
from acceptance.commands import ROOT, Desk
from acceptance.documents import OPERATE, PYTHON, blocks, commands, in_tests, shell
from services.machine import run_on_a_copy

pytestmark = [pytest.mark.timeout(240), pytest.mark.slow]

#: programs that the book's packages bring
PROGRAMS = ("redis-server", "rabbitmq-server", "rabbitmqctl", "pg_createcluster", "sqlite3", "openssl", "ip")

#: what stands for systemd here, which does not run in the copy: it starts what the units say
SYSTEMCTL = r"""#!/usr/bin/env python3
import os, re, shlex, signal, subprocess, sys, time
from pathlib import Path

_, verb, *names = [word for word in sys.argv if word not in ("--now", "--quiet")]
DEBIAN = {
    "redis-server": "runuser -u redis -- redis-server /etc/redis/redis.conf --daemonize yes; sleep 0.5",
    "rabbitmq-server": "rabbitmq-server -detached; until rabbitmqctl -q await_startup 2>/dev/null; do sleep 0.1; done",
}

def stop(name):
    place = Path(f"/run/{name}.pid")
    if place.exists():
        pid = int(place.read_text())
        os.kill(pid, signal.SIGTERM)
        while Path(f"/proc/{pid}/cmdline").exists() and Path(f"/proc/{pid}/cmdline").read_bytes():
            time.sleep(0.05)
        place.unlink()

def start(name):
    if name in DEBIAN:
        Path(f"/run/{name}").mkdir(exist_ok=True)
        subprocess.run(["sh", "-c", DEBIAN[name]], check=True, stdout=2)
        return
    kind, _, instance = name.partition("@")
    unit = Path(f"/etc/systemd/system/{kind}{'@' if instance else ''}.service").read_text()
    unit = unit.replace("%I", instance).replace("%i", instance)
    said = lambda key: re.findall(f"^{key}=(.*)$", unit, re.MULTILINE)
    environment = {"PATH": os.environ["PATH"], "HOME": "/srv/shadho"}
    for line in said("Environment"):
        environment.update([line.split("=", 1)])
    for path in said("EnvironmentFile"):
        if not path.startswith("-") or Path(path[1:]).exists():
            lines = Path(path.lstrip("-")).read_text().splitlines()
            environment.update(line.split("=", 1) for line in lines if line and line[0] != "#")
    line = said("ExecStart")[0].replace("$OPTIONS", environment.get("OPTIONS", ""))
    user, command = said("User")[0], shlex.split(line)
    with open(f"/var/log/{name}.log", "ab") as log:
        words = ["setpriv", f"--reuid={user}", f"--regid={user}", "--init-groups", *command]
        process = subprocess.Popen(
            words, env=environment, cwd=said("WorkingDirectory")[0], stdout=log, stderr=log, start_new_session=True
        )
    Path(f"/run/{name}.pid").write_text(str(process.pid))

for name in names if verb != "daemon-reload" else []:
    if verb in ("stop", "restart"):
        stop(name)
    if verb in ("start", "restart", "enable"):
        start(name)
"""

#: the state of a machine on which Debian has just installed the servers, and people
FRESH = f"""
exec 2>&1
rm -rf /var/lib/rabbitmq/mnesia /etc/rabbitmq/conf.d /etc/rabbitmq/rabbitmq.conf
rm -rf /var/lib/redis/* /var/lib/postgresql/* /etc/postgresql/*
mkdir -p /usr/local/sbin /etc/rabbitmq && echo NODENAME=rabbit@localhost > /etc/rabbitmq/rabbitmq-env.conf
for program in systemctl apt-get; do rm -f /usr/local/sbin/$program; done
cat > /usr/local/sbin/systemctl <<'END'
{SYSTEMCTL}
END
echo '#!/bin/sh' > /usr/local/sbin/apt-get && chmod +x /usr/local/sbin/*
export PATH="/usr/local/sbin:$PATH"
ln -s {sys.prefix} /opt/shadho-0.5.0 && ln -s {sys.prefix} /opt/shadho-0.6.0
rm -f /var/log/redis/* && chown redis /var/lib/redis /var/log/redis
pg_createcluster --start $(ls /usr/lib/postgresql | tail -1) main -- -N
"""


def typed_by(block: str) -> str:
    """Return the user whom the first line of a block names, beside the machine."""
    found = re.match(r"# (\w+), on [\w ]+\n", block)
    assert found is not None, f"the first line says neither who nor where: {block}"
    return found.group(1)


def lines(block: str) -> str:
    """Return a block as this machine runs it: without what needs the network."""
    text = re.sub(r"^(python3 -m venv|/opt/shadho-[\d.]+/bin/pip) .*\n", "", block, flags=re.MULTILINE)
    return re.sub(r"^.*sizing.py\n", "", text.replace("@node1", "@head.example"), flags=re.MULTILINE)


def as_script(texts: list[str], people: str) -> str:
    """Return the script of all blocks: each says first which it is, and is run as its first line says."""
    parts = [FRESH, people]
    for number, text in enumerate(texts):
        user = typed_by(text)
        parts.append(f"cat > /block-{number} <<'BLOCK'\nset -eu\n{lines(text)}BLOCK")
        folder = ROOT if user == "root" else f"/home/{user}"
        # A login shell, which reads the profile; each is a new one, as after an hour.
        shell = f"runuser -u {user} -- env HOME=$(getent passwd {user} | cut -d: -f6) PATH=$PATH bash -l"
        parts.append(f"echo '== {number}'; (cd {shlex.quote(str(folder))} && {shell} /block-{number})")
    return "\n".join(parts)


def test_the_book_brings_up_a_signed_fleet_with_tls_on_which_people_run_studies(tmp_path: Path) -> None:
    missing = [program for program in PROGRAMS if shutil.which(program) is None]
    if missing or not Path("/etc/redis/redis.conf").exists():
        pytest.skip(f"the servers of Debian are not installed: {', '.join(missing)}")
    study = PYTHON[0].replace('"trials": 30', '"trials": 4')
    people = "".join(
        f"useradd --create-home {name}; cat > /home/{name}/my_study.py <<'END'\n{study}\nEND\n"
        for name in ("ann", "ben")
    )
    script = as_script(blocks(OPERATE, "bash"), people)
    out = run_on_a_copy(script, tmp_path, isolated=True)
    said = re.split(r"^== .*\n", out, flags=re.MULTILINE)
    assert len(said) == len(blocks(OPERATE, "bash")) + 1
    for fact in (
        "Verification: OK",
        "number 1, 3 users; it has the key of ann",
        "4 complete, 0 failed of 4 trials",
        "of_ben",
        "40 complete, 0 failed of 40 trials",
        'shadho_fleet_slots{class="gpu_huge"',
    ):
        assert fact in out, fact


def test_the_sizes_of_the_servers_are_measured(desk: Desk) -> None:
    """The command of the book prints its table, here with two workers."""
    [command] = [line for line in commands(OPERATE) if "sizing.py" in line]
    line = in_tests(command.removeprefix("/opt/shadho/bin/"), "--workers 2 --seconds 0")
    out = shell(desk, line)
    figures = json.loads(out.splitlines()[-1])["figures"]
    # The study has had no time to open its own.
    assert 1 <= figures["connections"]["worker, RabbitMQ"] <= 4
    # One of the class, one of the machine of the real worker, two of played ones; and what the study has left.
    assert figures["2"]["queues"] == 1 + 1 + 2
    assert figures["2"]["waiting messages"] >= 2 * 4 * 3
