"""The Celery application, which ``celery -A shadho_celery worker -Q gpu_large`` uses.

Its only task passes a message to a slot of the worker (`node.slots`). The slot's process (`runner`) runs the trials of
the message. This module also sets up a worker when Celery starts it, and closes the worker at the end.
"""

from __future__ import annotations

import logging
import os
import re
import signal
import sys
import uuid
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from celery import Celery, Task, shared_task, signals
from celery.exceptions import Reject

from shadho_celery.cli.messages import readable_warnings
from shadho_celery.core import hardware
from shadho_celery.core.checks import mask, printable
from shadho_celery.core.files import CHECKPOINTS, SHIPPED_CODE
from shadho_celery.core.hardware import Machine
from shadho_celery.core.names import FORMS
from shadho_celery.core.system import BROKER_CONNECT_SECONDS
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.fleet import broker
from shadho_celery.fleet.celery_settings import configuration
from shadho_celery.fleet.policy import Guard
from shadho_celery.fleet.redis import connect, own_address
from shadho_celery.fleet.registry import Worker
from shadho_celery.fleet.signing import Signer
from shadho_celery.fleet.urls import default_broker, prefer_own
from shadho_celery.metrics.server import MetricsServer
from shadho_celery.metrics.worker import collector
from shadho_celery.node.consumer import AMQP, CarefulConsumer, Consumer
from shadho_celery.node.logs import ready, tell
from shadho_celery.node.shutdown import Shutdown, await_reason
from shadho_celery.node.slots import NotMine, Slots
from shadho_celery.node.stay import Stay
from shadho_celery.objective.study_file import cores_per_trial, module_name, preloaded, refuse_libraries, refuse_nested
from shadho_celery.runner.process_tree import hide_memory
from shadho_celery.runner.starting import ForkServers, start_method

log = logging.getLogger(__name__)


@contextmanager
def _refusals() -> Iterator[None]:
    """At a ShadhoError, end the command with one line instead of a traceback, and with exit code 2."""
    try:
        yield
    except ShadhoError as error:
        sys.stderr.write(f"shadho_celery: {error}\n")
        raise SystemExit(2) from None


prefer_own()
app = Celery("shadho_celery", amqp=AMQP)
with _refusals(), readable_warnings():
    # `conf.update` is not used, because Celery would first load the module that the variable CELERY_CONFIG_MODULE
    # names. That module may belong to another project.
    app.config_from_object(configuration() | {"worker_consumer": CarefulConsumer})
app.steps["worker"].add(Shutdown)
#: prepared processes from which slots fork; None unless `shadho_celery.worker` has started them
app.shadho_fork_servers = None
#: server of this worker's metrics; None if they are not served
app.shadho_metrics = None
#: exit code of the worker in this process; it is 1 until the worker has shut down as planned
app.shadho_exit_code = 1


@shared_task(name=broker.TASK, bind=True, ignore_result=True)  # type: ignore[untyped-decorator]
def trial(self: Task, payload: dict[str, Any]) -> None:
    """Run the attempts in one message, or one replica of a gang (a trial on several slots).

    An exception that a trial raises is recorded as its outcome.
    """
    slots: Slots = self.app.shadho_slots
    try:
        slots.run(broker.read_message(payload, self.request, slots.signer))
    except broker.RefusedMessage as error:
        if slots.heartbeat.is_stranger:
            # It came before this worker could stop to take messages.
            raise Reject(str(error), requeue=True) from None
        log.error("%s", error)
    except NotMine as error:
        log.warning("%s", error)
        raise Reject(str(error), requeue=True) from None


@signals.celeryd_init.connect  # type: ignore[untyped-decorator]
@_refusals()
def _set_up(sender: str, instance: Any, conf: Any, options: dict[str, Any], **_: object) -> None:
    """Set the worker's queue, number of slots and unique name before Celery builds the worker.

    Celery's banner is not printed; `_ready` prints a line instead.
    """
    instance.quiet = True
    refuse_nested()
    # Celery would try to import these files, which are not modules.
    if forms := [name for name in options.get("include") or () if name.endswith(tuple(FORMS))]:
        options["include"][:] = [name for name in options["include"] if name not in forms]
        conf.shadho_imports = [*conf.get("shadho_imports", ()), *forms]
    refuse_libraries(_imports(conf, options))
    start_method()
    hardware.slots_per_gpu()
    Stay.configured()
    app.shadho_metrics = MetricsServer.configured()
    machine = hardware.detect()
    names = _listed(options.get("queues"))
    if len(names) > 1:
        raise UsageError(f"one worker serves one class; start one for each: -Q {', -Q '.join(names)}")
    name = names[0] if names else machine.compute_class
    hardware.check_class_name(name, "-Q")
    conf.task_default_queue = name
    conf.task_queues = [broker.queue(name)]
    if not conf.worker_concurrency:
        conf.worker_concurrency = machine.slots_for(name, cores_per_trial(_imports(conf, options)))
    if sender.startswith("celery@"):
        # Celery gives all workers of a machine the same name. RabbitMQ would then refuse the second worker's control
        # queue. The name has a random part, because in containers host names and process ids may be equal too.
        instance.hostname = f"{name}-{os.getpid()}-{uuid.uuid4().hex[:8]}@{sender.partition('@')[2]}"


@signals.after_setup_logger.connect  # type: ignore[untyped-decorator]
def _quieten(loglevel: int, **_: object) -> None:
    """Silence Celery's log lines about its start and its tasks, except errors. This package logs its own lines."""
    if loglevel > logging.DEBUG:
        # Celery would log each message that it receives and handles, and a traceback for each message that it returns
        # to the queue.
        logging.getLogger("celery.worker.strategy").setLevel(logging.WARNING)
        logging.getLogger("celery.app.trace").setLevel(logging.ERROR)
        logging.getLogger("celery.apps.worker").setLevel(logging.WARNING)


#: lines that Celery logs when the connection is lost: one for each message that it cannot acknowledge, and advice about
#: a setting. They are dropped, because another line reports the loss
_OF_LOST_CONNECTIONS = re.compile(r"Couldn't ack |\S*consumer\.py:\d+: CPendingDeprecationWarning")


class _Printable(logging.Filter):
    """Escapes control characters in log lines, because names and error messages in them may come from strangers.

    Drops the lines of `_OF_LOST_CONNECTIONS`.
    """

    def filter(self, record: logging.LogRecord) -> bool:
        record.msg, record.args = printable(record.getMessage()), None
        if _OF_LOST_CONNECTIONS.match(record.msg):
            return False
        if record.exc_info and not record.exc_text:
            record.exc_text = printable(logging.Formatter().formatException(record.exc_info))
        return True


@signals.after_setup_logger.connect  # type: ignore[untyped-decorator]
@signals.after_setup_task_logger.connect  # type: ignore[untyped-decorator]
def _clean(logger: logging.Logger, **_: object) -> None:
    for handler in logger.handlers:
        handler.addFilter(_Printable())


@signals.worker_init.connect  # type: ignore[untyped-decorator]
@_refusals()
def _open(sender: Any, **_: object) -> None:
    """Start the slots' processes, which are prepared while Celery connects. Also consume this machine's own queue."""
    # Trials run as the same user, and must not read passwords of broker and Redis from this process's memory.
    hide_memory()
    # At SIGHUP, Celery restarts this process with `sys.argv`. After ``python -m``, `sys.argv` begins with the path of a
    # file in this package, so Python would search the package's folder first, and find this module as `celery`.
    sys.argv = sys.orig_argv[1:]
    conf = sender.app.conf
    imports = _imports(conf, {"include": sender.include})
    # The prepared process is started first, because its imports take longer than the rest of this function.
    fork_servers = _prepared(imports)
    machine = hardware.detect()
    name = next(iter(sender.app.amqp.queues.consume_from))
    names = [name, broker.machine_queue(name, machine.host)]
    _consume(sender, names)
    if (line := default_broker(str(conf.broker_url))) is not None:
        log.warning("%s", line)
    client = connect(conf.get("shadho_redis_url"))
    address = own_address(client)
    connection = sender.app.connection_for_read(heartbeat=0, connect_timeout=BROKER_CONNECT_SECONDS)
    if (silent := broker.check_access(connection, names, str(conf.broker_url))) is not None:
        log.warning("%s", silent)
    sender.app.shadho_slots = slots = Slots(
        client,
        machine=machine,
        compute_class=name,
        count=int(sender.concurrency),
        imports=imports,
        checkpoints=CHECKPOINTS.absolute(),
        address=address,
        signer=Signer.configured(),
        control=Signer.for_control(),
        guard=Guard.configured(client),
        code_folder=SHIPPED_CODE.absolute() if conf.get("shadho_accept_code") else None,
        fork_servers=fork_servers,
        shares_gpus=hardware.slots_per_gpu() is None,
    )
    slots.check()
    _warn(machine, slots.worker, accepts_code=bool(conf.get("shadho_accept_code")))
    slots.start()
    if app.shadho_metrics is not None:
        app.shadho_metrics.serve(collector(slots))
        slots.heartbeat.tell(metrics=app.shadho_metrics.place(address))


def _prepared(imports: Sequence[str]) -> ForkServers:
    """Return the prepared processes from which slots fork. They have imported the libraries that `imports` preload.

    The command `shadho_celery.worker` may have started them already, as `app.shadho_fork_servers`.
    """
    # `app` is used, because the sender has another application if the worker was started without -A.
    fork_servers: ForkServers | None = app.shadho_fork_servers
    preload = preloaded(imports)
    if fork_servers is None or fork_servers.preload != preload:
        if fork_servers is not None:
            fork_servers.close()
        fork_servers = ForkServers(preload)
        fork_servers.prepare()
    return fork_servers


def _consume(sender: Any, names: Sequence[str]) -> None:
    """Consume the queues with these names, and use no other queue or exchange of the broker."""
    # Mingle and gossip need queues that a user of the broker may not be allowed to use. Workers share their state in
    # Redis.
    sender.options |= {"without_mingle": True, "without_gossip": True}
    queues = sender.app.amqp.queues
    # Celery would declare an exchange for the class, which is not needed and may be forbidden.
    queues.default_exchange = None
    for name in names:
        queues.select_add(broker.queue(name))


def _warn(machine: Machine, worker: Worker, *, accepts_code: bool) -> None:
    """Warn if the worker has no study modules and accepts no code, or if its GPUs are of several kinds."""
    if not (worker.imports or accepts_code):
        log.warning(
            "this worker has no study modules and runs nothing; start it with --import my_study, or with "
            "SHADHO_IMPORTS=my_study, in the folder that holds my_study.py"
        )
    if len(hardware.kinds_of(machine.gpus_for(worker.compute_class))) > 1:
        log.warning(
            "this worker's GPUs are of several kinds, and count as the smallest (%s); shadho-celery worker, without "
            "--class, starts one worker for each kind",
            hardware.gpus_text(machine.cards),
        )


@signals.worker_ready.connect  # type: ignore[untyped-decorator]
def _ready(sender: Any, **_: object) -> None:
    slots: Slots = sender.app.shadho_slots
    queues = [*sender.app.amqp.queues.consume_from]
    slots.heartbeat.announce(Consumer(sender, queues))
    tell(ready(slots.name, slots.worker, queues, mask(str(sender.app.conf.broker_url))))
    if app.shadho_metrics is not None:
        tell(f"metrics: {app.shadho_metrics.url}")


@signals.worker_shutdown.connect  # type: ignore[untyped-decorator]
def _close(sender: Any, **_: object) -> None:
    # After a restart at SIGHUP, the new process inherits the ignored signal. So another SIGHUP does not end the new
    # process before its handler is installed.
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    # Otherwise Ctrl-C would kill the process while Python shuts down. All trials have ended by now.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    await_reason()
    sender.app.shadho_slots.close()
    sender.app.shadho_exit_code = sender.exitcode or 0


def _imports(conf: Any, options: dict[str, Any]) -> list[str]:
    """Return the names of this worker's study modules.

    They come from SHADHO_IMPORTS (by default the checkout's tasks), Celery's setting `imports`, and the option -I.
    """
    given = [*conf.get("shadho_imports", ()), *conf.imports, *_listed(options.get("include"))]
    names = map(module_name, given)
    return [name for name in dict.fromkeys(names) if name.partition(".")[0] not in {"shadho_celery", "celery"}]


def _listed(names: str | Iterable[str] | None) -> list[str]:
    """Return names that are given as a list, or as a text with commas."""
    return [name for name in (names.split(",") if isinstance(names, str) else names or ()) if name]
