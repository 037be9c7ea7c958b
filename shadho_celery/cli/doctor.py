"""The command `doctor`, which checks a fleet or this machine before trials fail because of a fault.

A check is a function that examines one part of the `Site`, such as the broker. It returns a `Finding`, or None if the
site has no such part. The docstring of a check states the condition that must hold. `Finding.name` is made from the
name of the function.
"""

from __future__ import annotations

import math
import os
import resource
import shutil
import tempfile
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from shadho_celery.cli import shared_options
from shadho_celery.cli.messages import say
from shadho_celery.cli.status import codes
from shadho_celery.core import hardware
from shadho_celery.core.checks import listed, mask, one_line
from shadho_celery.core.files import CHECKPOINTS
from shadho_celery.core.units import counted, duration, took
from shadho_celery.core.users import USER_KEY_FILE, own_user
from shadho_celery.errors import ServiceError, ShadhoError
from shadho_celery.fleet import urls

if TYPE_CHECKING:
    from shadho_celery.fleet.limits import BrokerFacts, RedisFacts
    from shadho_celery.fleet.registry import Worker
    from shadho_celery.fleet.state import FleetState

#: expected seconds of the longest trial, if --longest-trial is not given
LONGEST_SECONDS = 86400.0

#: a store whose write takes this many seconds is too slow
SLOW_SECONDS = 0.25

#: maximum difference in seconds between two clocks; the check `clocks` reports a greater one as a fault
CLOCK_SECONDS = 5.0

#: free bytes below which a disk counts as full
FREE_BYTES = 256 * 2**20

#: number of open files that a command needs, and number that each slot of a worker adds; the same for processes
BASE_FILES, SLOT_FILES, BASE_PROCESSES, SLOT_PROCESSES = 256, 16, 64, 32

#: value in a `Site` of servers that the user has not named
NO_FLEET = ServiceError("no fleet is named")

T = TypeVar("T")

#: maximum number of names that a finding lists
NAMES = 4


class State(Enum):
    """Result of a check."""

    OK = "ok"
    #: the check could not get the information that it needs
    UNKNOWN = "unknown"
    WRONG = "wrong"


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Result of one check, which is printed in one line."""

    #: name of the check; set by `examine`
    name: str = ""
    state: State
    text: str
    #: what the user can do about the fault; "" for nothing
    remedy: str = ""
    #: name of the check, broker or redis, whose fault prevented this check; else ""
    needs: str = ""


def _ok(text: str) -> Finding:
    return Finding(state=State.OK, text=text)


def _unknown(text: str, remedy: str = "") -> Finding:
    return Finding(state=State.UNKNOWN, text=text, remedy=remedy)


def _wrong(text: str, remedy: str) -> Finding:
    return Finding(state=State.WRONG, text=text, remedy=remedy)


@dataclass(frozen=True, kw_only=True)
class Site:
    """Data that the checks examine. If reading a part of the data failed, its field has the error."""

    #: URL of the store
    store: str
    #: expected seconds of the longest trial
    longest: float
    machine: hardware.Machine
    broker: BrokerFacts | ShadhoError = NO_FLEET
    #: a client of Redis, and below it the facts about the server
    redis: Any | ShadhoError = NO_FLEET
    redis_facts: RedisFacts | ShadhoError = NO_FLEET
    fleet: FleetState | ShadhoError = NO_FLEET

    @property
    def workers(self) -> Mapping[str, Worker]:
        """The live workers by name; none if they could not be read."""
        return {} if isinstance(self.fleet, ShadhoError) else self.fleet.workers


def needed(found: T | ShadhoError) -> T:
    """Return a field of a `Site`. Raises the error that the field holds instead."""
    if isinstance(found, ShadhoError):
        raise found
    return found


def look(store: str, longest: float) -> Site:
    """Return the data about this machine, and about the fleet if the environment has its URLs."""
    site = Site(store=store, longest=longest, machine=hardware.detect())
    if not urls.is_fleet({}):
        return site
    # Imported here, because Celery's libraries take half a second to import, and read the environment.
    from shadho_celery.fleet.limits import broker_facts, redis_facts
    from shadho_celery.fleet.redis import connect
    from shadho_celery.fleet.state import read_fleet

    broker, client = _asked(broker_facts), _asked(lambda: connect(urls.url(urls.REDIS)))
    if isinstance(broker, ShadhoError) and isinstance(client, ShadhoError) and _is_one_server():
        client = broker
    has_broker = not isinstance(broker, ShadhoError)
    return replace(
        site,
        broker=broker,
        redis=client,
        redis_facts=_asked(lambda: redis_facts(needed(client))),
        fleet=client if isinstance(client, ShadhoError) else _asked(lambda: read_fleet(has_broker=has_broker)),
    )


def _is_one_server() -> bool:
    """Return whether broker and Redis are the same server."""
    broker, redis = (urls.url(name).partition("://")[2].partition("/")[0] for name in (urls.BROKER, urls.REDIS))
    return bool(redis) and broker.rpartition("@")[2] == redis.rpartition("@")[2]


def _asked(ask: Callable[[], T]) -> T | ShadhoError:
    try:
        return ask()
    except ShadhoError as error:
        return error


def broker(site: Site) -> Finding:
    """The broker accepts a connection."""
    facts = needed(site.broker)
    return _ok(f"{facts.product} at {mask(urls.url(urls.BROKER))}, connected in {took(facts.seconds)}")


def broker_alarms(site: Site) -> Finding | None:
    """RabbitMQ accepts messages. It stops accepting them while its memory or disk is nearly full."""
    facts = needed(site.broker)
    if not facts.is_rabbitmq:
        return None
    if facts.accepts is False:
        remedy = "free it, or raise vm_memory_high_watermark or lower disk_free_limit; see rabbitmq-diagnostics alarms"
        return _wrong("the broker takes no messages, because its memory or disk is nearly full", remedy)
    if facts.accepts is None:
        return _unknown(
            "this user may not publish a message", "give the scheduler's user, or rabbitmq-diagnostics alarms"
        )
    return _ok("the broker takes messages")


def consumer_timeout(site: Site) -> Finding | None:
    """RabbitMQ lets a message stay unacknowledged for as long as a trial takes."""
    facts = needed(site.broker)
    if not facts.is_rabbitmq:
        return None
    remedy = "set consumer_timeout as in deploy/rabbitmq/rabbitmq.conf, and restart the broker"
    if (allowed := facts.consumer_timeout) is None:
        return _unknown(
            "only rabbitmqctl on the broker's machine tells it; by default it is 30 min",
            f"run doctor there as the broker's user; {remedy}",
        )
    if allowed < site.longest:
        text = f"a trial of more than {duration(allowed)} is taken from its worker, and runs again"
        return _wrong(text, f"{remedy}, or give --longest-trial if no trial takes {duration(site.longest)}")
    return _ok("none" if math.isinf(allowed) else duration(allowed))


def visibility_timeout(site: Site) -> Finding | None:
    """If Redis is the broker, it does not deliver a message a second time while the message's trial runs."""
    if (seconds := needed(site.broker).visibility) is None:
        return None
    if seconds < site.longest:
        text = f"a message is delivered again after {duration(seconds)}, while its trial may still run"
        return _wrong(text, "raise visibility_timeout in broker_transport_options of celeryconfig.py, on all machines")
    return _ok(duration(seconds))


def redis(site: Site) -> Finding:
    """Redis answers."""
    needed(site.redis)
    return _ok(f"it answers at {mask(urls.url(urls.REDIS))}")


def redis_memory(site: Site) -> Finding:
    """Redis evicts no keys, and has memory left."""
    facts = needed(site.redis_facts)
    if facts.policy != "noeviction":
        text = f"maxmemory-policy is {facts.policy}, so results and queued trials may vanish"
        return _wrong(text, "set maxmemory-policy noeviction, as in deploy/redis/redis.conf")
    if facts.most and facts.used > 0.9 * facts.most:
        return _wrong(f"{facts.used / facts.most:.0%} of maxmemory is in use", "raise maxmemory, or delete old keys")
    return _ok(f"{facts.policy}, {facts.used / 2**20:,.0f} MiB in use" + ("" if facts.most else ", no maxmemory"))


def redis_persistence(site: Site) -> Finding:
    """Redis keeps results and leases when it restarts."""
    facts = needed(site.redis_facts)
    if not facts.is_saved:
        return _wrong("its last write to disk has failed", "make room on its disk; its log has the reason")
    if not facts.appends:
        text = "without an append-only file a restart loses results, and their trials run again"
        return _wrong(text, "set appendonly yes and appendfsync everysec, as in deploy/redis/redis.conf")
    return _ok("append-only file")


def clocks(site: Site) -> Finding:
    """The machines' clocks agree."""
    from shadho_celery.fleet.redis import clock_offset, refusals

    with refusals():
        offsets = {"this machine": clock_offset(needed(site.redis))}
    offsets |= {
        worker.machine.host: float(worker.clock_offset)
        for worker in needed(site.fleet).workers.values()
        if worker.clock_offset is not None and worker.machine.host != site.machine.host
    }
    # The offsets are relative to the clock of the Redis server. No machine may differ too much from this clock, either.
    first, last = min(offsets, key=offsets.__getitem__), max(offsets, key=offsets.__getitem__)
    apart = offsets[last] - offsets[first]
    if max(apart, *map(abs, offsets.values())) > CLOCK_SECONDS:
        lag = {name: f"{offset:+.0f} s" for name, offset in offsets.items() if abs(offset) > CLOCK_SECONDS}
        text = "compared with the Redis server: " + _few([f"{name} {by}" for name, by in lag.items()] or [first, last])
        return _wrong(text, "synchronise the clocks (chrony, systemd-timesyncd): signed requests are valid for 10 s")
    return _ok(f"{counted(len(offsets), 'machine')}, at most {apart:.1f} s apart")


def store(site: Site) -> Finding:
    """The store can be written, and is fast enough."""
    from shadho_celery.store.engine import commit_seconds

    seconds = commit_seconds(site.store)
    text = f"{mask(site.store)}, a write takes {took(seconds)}"
    if seconds > SLOW_SECONDS:
        return _wrong(text, "use a faster disk or a nearer database: each turn of a scheduler waits for a write")
    return _ok(text)


def disks(site: Site) -> Finding:
    """The disks of the store, of checkpoints and of temporary files have room."""
    from shadho_celery.store.engine import folder_of

    places = {
        "store": folder_of(site.store),
        "checkpoints": CHECKPOINTS,
        "temporary files": Path(tempfile.gettempdir()),
    }
    full, free = [], {}
    for name, place in places.items():
        if place is None:
            continue
        folder = next(each for each in (place.absolute(), *place.absolute().parents) if each.is_dir())
        found, inodes = shutil.disk_usage(folder), os.statvfs(folder)
        free[name] = found.free
        if found.free < FREE_BYTES or (inodes.f_files and not inodes.f_favail):
            full.append(f"{folder} ({name}: {found.free / 2**20:,.0f} MiB, {inodes.f_favail:,} files free)")
    if full:
        return _wrong(f"nearly full: {_few(full)}", "make room there, or use another disk")
    return _ok(", ".join(f"{name} {size / 2**30:,.1f} GiB free" for name, size in free.items()))


def open_files(site: Site) -> Finding:
    """Enough open files are allowed."""
    return _limit(resource.RLIMIT_NOFILE, BASE_FILES + SLOT_FILES * _slots(site), "open files", "nofile")


def processes(site: Site) -> Finding:
    """A worker may start enough processes and threads."""
    return _limit(resource.RLIMIT_NPROC, BASE_PROCESSES + SLOT_PROCESSES * _slots(site), "processes", "nproc")


def gpus(site: Site) -> Finding:
    """The driver shows the GPUs that this process may use, and no two workers use the same one."""
    machine, visible = site.machine, os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible and not machine.cards:
        text = f"CUDA_VISIBLE_DEVICES is {one_line(visible, 80)}, but no such GPU is found"
        return _wrong(text, "name the GPUs by the indexes of nvidia-smi, or unset it")
    if not machine.cards and visible is None and Path("/dev/nvidia0").exists():
        return _wrong("there is a GPU, but its driver does not answer", "run nvidia-smi, which tells the reason")
    if shared := _shared_gpus(site.workers):
        return _wrong(f"two workers use the same GPU: {_few(shared)}", "give each its own CUDA_VISIBLE_DEVICES")
    on_gpus = {name: each for name, each in sorted(site.workers.items()) if each.compute_class.startswith("gpu")}
    if bare := [name for name, each in on_gpus.items() if not each.machine.cards]:
        return _wrong(f"these workers see no GPU: {_few(bare)}", "check their driver, or start them as another class")
    return _ok(hardware.gpus_text(machine.cards) or "none here")


def workers(site: Site) -> Finding:
    """Each class with waiting messages has workers that take trials. If a study runs, any class has such workers."""
    fleet = needed(site.fleet)
    serving = {worker.compute_class for worker in fleet.workers.values() if not worker.draining}
    waiting = [f"{name} ({depth:,} waiting)" for name in fleet.depths if (depth := fleet.waiting(name) or 0)]
    lonely = [text for text in waiting if text.rpartition(" (")[0] not in serving]
    if lonely:
        return _wrong(f"queues without workers: {_few(lonely)}", "start one: shadho-celery worker --class NAME")
    stopped = [name for name, each in sorted(fleet.workers.items()) if each.state == "quarantined"]
    if stopped:
        return _wrong(f"quarantined: {_few(stopped)}", "repair the machine, then restart the worker; its log says why")
    if fleet.studies and not serving:
        text = f"no worker is live for {counted(len(fleet.studies), 'study', 'studies')}"
        return _wrong(text, "start one on a machine: shadho-celery worker --import MODULE")
    by_class = Counter(worker.compute_class for worker in fleet.workers.values())
    return _ok(", ".join(f"{count} {name}" for name, count in sorted(by_class.items())) or "none is live")


def queues(site: Site) -> Finding:
    """Each class with workers has its queue."""
    needed(site.broker)
    fleet = needed(site.fleet)
    serving = {worker.compute_class for worker in fleet.workers.values() if not worker.draining}
    if missing := sorted(name for name in serving if fleet.waiting(name) is None):
        remedy = "restart these workers, which declare it, and see that they use this broker and its virtual host"
        return _wrong(f"workers without a queue on this broker: {_few(missing)}", remedy)
    return _ok(", ".join(f"{name} {fleet.waiting(name) or 0:,}" for name in fleet.depths) or "none")


def protocol(site: Site) -> Finding:
    """All workers use the same version of the protocol as this package."""
    from shadho_celery.fleet.broker import PROTOCOL

    other = [
        f"{name} ({each.protocol})"
        for name, each in sorted(needed(site.fleet).workers.items())
        if each.protocol != PROTOCOL
    ]
    if other:
        return _wrong(f"not protocol {PROTOCOL}: {_few(other)}", "install the same version of shadho_celery everywhere")
    return _ok(f"{PROTOCOL}")


def keys(site: Site) -> Finding:
    """All processes know all keys, or nothing is signed."""
    from shadho_celery.fleet.registry import Keys, keys_of
    from shadho_celery.fleet.signing import KEY_FILE, Signer
    from shadho_celery.fleet.state import who_knows

    signer, remedy = Signer.configured(), f"give all machines the same key in {KEY_FILE}"
    ours = signer.fingerprint
    if refusals := needed(site.fleet).refused:
        refused = counted(refusals, "announcement is", "announcements are")
        return _wrong(f"{refused} malformed or not signed with this machine's key {ours}".rstrip(), remedy)
    processes = needed(site.fleet).keys
    if other := [name for name, each in processes if each.key and not ours]:
        return _wrong(f"these have a key, this machine none: {_few(other)}", remedy)
    found = who_knows([("this machine", Keys(**keys_of(signer, None))), *processes])
    if lacking := [
        f"{key} is unknown to {_few(each['unknown_to'])}" for key, each in found.items() if each["unknown_to"]
    ]:
        remedy = "add it to their key files, or remove it from all; it may sign only once all know it"
        return _wrong(f"key {'; key '.join(lacking)}", remedy)
    if len(found) > 1:
        signs = (f"{key} signs for {len(each['signs_for'])}" for key, each in found.items())
        return _ok(f"all know two: key {', key '.join(signs)}")
    return _ok(f"key {ours}" if ours else "nothing is signed")


def policy(site: Site) -> Finding | None:
    """If the fleet has admins, its policy is in force, and has the key of this user if one is named."""
    from shadho_celery.fleet.policy import Guard

    if (guard := Guard.configured(needed(site.redis))) is None:
        return None
    if (found := guard.policy) is None:
        return _wrong(guard.trouble.partition("; ")[0], "an admin sets it: shadho-celery fleet policy set FILE")
    if has_key := bool(os.environ.get(USER_KEY_FILE)):
        guard.refuse_self()
    own = f"it has the key of {own_user()}" if has_key else f"no user's key is named in {USER_KEY_FILE}"
    return _ok(f"number {found.number}, {counted(len(found.users), 'user')}; {own}")


def code(site: Site) -> Finding:
    """All workers have the same version of each study module."""
    differing = {module: found for module, found in codes(needed(site.fleet).workers).items() if len(found) > 1}
    for module, versions in sorted(differing.items()):
        parts = [f"{digest or 'one that fails'} on {listed(hosts, NAMES)}" for digest, hosts in versions.items()]
        return _wrong(f"{module} differs: {_few(parts)}", "copy the same files to all machines, or use --code ship")
    return _ok(
        counted(len({module for worker in needed(site.fleet).workers.values() for module in worker.imports}), "module")
    )


def checkpoints(site: Site) -> Finding:
    """Workers on several machines share the disk of their checkpoints."""
    storages: dict[str, set[str]] = defaultdict(set)
    for worker in needed(site.fleet).workers.values():
        storages[worker.storage or f"of {worker.machine.host}"].add(worker.machine.host)
    hosts = {host for each in storages.values() for host in each}
    if len(hosts) > 1 and len(storages) > 1:
        text = f"{len(hosts)} machines have {len(storages)} storages: a trial that moves to another one begins anew"
        return Finding(state=State.OK, text=text, remedy="start the workers in a folder on a shared disk")
    return _ok("shared" if len(hosts) > 1 else "on one machine" if hosts else "no worker is live")


Check = Callable[[Site], Finding | None]

#: the checks of this machine, and below them the checks of a fleet, both in the order in which they are shown
OF_MACHINE: Sequence[Check] = (store, disks, open_files, processes, gpus)
OF_FLEET: Sequence[Check] = (
    broker,
    broker_alarms,
    consumer_timeout,
    visibility_timeout,
    redis,
    redis_memory,
    redis_persistence,
    clocks,
    workers,
    queues,
    protocol,
    keys,
    policy,
    code,
    checkpoints,
)


def examine(site: Site) -> list[Finding]:
    """Return the findings of all checks that apply to a site."""
    checks = OF_MACHINE if site.broker is NO_FLEET else [*OF_FLEET, *OF_MACHINE]
    found = ((check.__name__.replace("_", " "), _judged(check, site)) for check in checks)
    return [replace(finding, name=name) for name, finding in found if finding is not None]


def _judged(check: Check, site: Site) -> Finding | None:
    try:
        return check(site)
    except OSError as error:
        return _unknown(one_line(error))
    except ShadhoError as error:
        servers = {"broker": site.broker, "redis": site.redis}
        owner = next((name for name, server in servers.items() if server is error), "")
        if (owner or error in (site.redis_facts, site.fleet)) and check.__name__ != owner:
            # The part in brackets, cause and remedy, is left out, because the check of the server itself shows it.
            return replace(_unknown(one_line(error).partition(" (")[0]), needs=owner)
        # The text of an error is the cause, a semicolon, and the remedy.
        text, _, remedy = one_line(error, 500).partition("; ")
        return _wrong(text, remedy)


@shared_options.command(
    "doctor",
    "doctor --url-file ~/fleet.urls --longest-trial 6h",
    f"{urls.BROKER}=amqp://127.0.0.1 {urls.REDIS}=redis://127.0.0.1/0 shadho-celery doctor --json",
)
@shared_options.duration_option(
    "--longest-trial",
    "longest",
    default=duration(LONGEST_SECONDS).replace(" ", ""),
    help="Duration of the longest trial that you expect; the broker must wait for as long.",
)
@shared_options.store_option
@shared_options.json_option
@shared_options.on_fleet
def doctor(*, longest: float, store: str, as_json: bool) -> None:
    """Check what a fleet or this machine needs: servers and their limits, the store, clocks, workers, queues, disks.

    Nothing is changed. Each fault is one line with its remedy. The exit code is 1 if something is wrong.
    """
    shared_options.warn_of_password("--store", store, "PGPASSWORD or ~/.pgpass")
    found = examine(look(store, longest))
    wrong, unknown = (sum(each.state is state for each in found) for state in (State.WRONG, State.UNKNOWN))
    if as_json:
        checks = [{**asdict(each), "state": each.state.value} for each in found]
        shared_options.print_json({"wrong": wrong, "unknown": unknown, "checks": checks})
    else:
        for each in (each for each in found if not each.needs):
            others = [other.name for other in found if other.needs == each.name]
            parts = [each.text, each.remedy, f"not checked because of it: {', '.join(others)}" if others else ""]
            say(f"{each.state.value:<7} {each.name}: {'; '.join(filter(None, parts))}")
        made = counted(len(found), "check")
        result = f"{wrong} of {made} found something wrong" if wrong else f"nothing wrong was found ({made})"
        say(result + (f"; {unknown} of them could not be made" if unknown else ""))
    raise SystemExit(1 if wrong else 0)


def _few(texts: Sequence[str]) -> str:
    return listed([one_line(text) for text in texts], NAMES)


def _limit(kind: int, wanted: int, what: str, name: str) -> Finding:
    soft, hard = resource.getrlimit(kind)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        way = f"ulimit -n {wanted}" if kind == resource.RLIMIT_NOFILE else f"ulimit -u {wanted}"
        is_allowed = hard == resource.RLIM_INFINITY or hard >= wanted
        remedy = way if is_allowed else f"raise {name} in /etc/security/limits.conf, or Limit{name.upper()} of the unit"
        return _wrong(f"at most {soft:,} {what}, a worker here may need {wanted:,}", f"before it starts: {remedy}")
    return _ok("no limit" if soft == resource.RLIM_INFINITY else f"{soft:,}")


def _slots(site: Site) -> int:
    return site.machine.slots_for(site.machine.compute_class)


def _shared_gpus(workers: Mapping[str, Worker]) -> list[str]:
    """Return a text for each GPU that several workers of a machine use, with the names of the workers."""
    users: dict[tuple[str, str], list[tuple[str, str]]] = defaultdict(list)
    for name, worker in sorted(workers.items()):
        for gpu in worker.machine.gpus_for(worker.compute_class):
            users[worker.machine.host, gpu.uuid or gpu.id].append((gpu.id, name))
    return [
        f"{each[0][0]} of {host} ({' and '.join(name for _, name in each)})"
        for (host, _), each in users.items()
        if len(each) > 1
    ]
