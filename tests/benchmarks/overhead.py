"""What the search costs beside the trials: ``python tests/benchmarks/overhead.py [--quick]``.

A study of no-op trials on two worker processes, on Redis and on RabbitMQ, beside

- bare Celery: as many no-op tasks sent with ``apply_async``, on the same pool (threads), ack mode and concurrency, and
  on the prefork pool, timed from the first publish to the last task's end;
- Optuna: Redis journal, random sampler, two processes.

All of them alternate within one run, so the ratios are of figures measured side by side. And the memory that a
scheduler grows by over 25 times as many no-op trials.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from importlib.util import find_spec
from pathlib import Path

import redis
from figures import finish, goal, quartiles

from shadho_celery.fleet.redis import connect
from shadho_celery.fleet.registry import Registry, Worker

ROOT = Path(__file__).parents[2]

#: in the name of every queue, so that no worker of another run takes part
RUN = uuid.uuid4().hex[:8]

#: a study file whose trials do nothing
NOOP_STUDY = """
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"sampler": "random"}
def objective(params):
    return params["x"]
"""

#: a plain Celery application with a no-op task; the last ones leave a mark, so that their end is seen
BARE_APP = """
import os, redis
from celery import Celery
app = Celery("bare", broker=os.environ["CELERY_BROKER_URL"])
app.conf.update(
    task_acks_late=True, worker_prefetch_multiplier=1, task_ignore_result=True, worker_send_task_events=False,
    task_serializer="json", accept_content=["json"], broker_connection_retry_on_startup=True,
    worker_cancel_long_running_tasks_on_connection_loss=False, task_default_queue=os.environ["BARE_QUEUE"],
    broker_transport_options={"visibility_timeout": 86400} if "redis" in os.environ["CELERY_BROKER_URL"] else {},
)
client = redis.Redis.from_url(os.environ["SHADHO_REDIS_URL"])
@app.task
def noop(mark):
    if mark:
        client.rpush(mark, 1)
"""

OPTUNA = """
import sys, optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalRedisBackend
optuna.logging.set_verbosity(optuna.logging.ERROR)
storage = JournalStorage(JournalRedisBackend(sys.argv[1]))
study = optuna.create_study(study_name=sys.argv[2], storage=storage, load_if_exists=True,
                            sampler=optuna.samplers.RandomSampler())
study.optimize(lambda trial: trial.suggest_float("x", 0, 1), n_trials=int(sys.argv[3]))
"""

MEMORY = """
import resource, sys
from hyperopt import hp
from shadho_celery import minimize
SPACE = {"x": hp.uniform("x", 0, 1), "y": hp.choice("y", [0, 1, 2])}
how = {"seed": 0, "sampler": "random"}
minimize(lambda params: params["x"], SPACE, trials=1000, **how)
before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
study = minimize(lambda params: params["x"], SPACE, trials=int(sys.argv[1]), store=sys.argv[2], **how)
print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024)
"""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and trials; for a first look")
    parser.add_argument("--trials", type=int, default=None, help="trials of a study [4000; 1000 with --quick]")
    parser.add_argument("--repeats", type=int, default=None, help="alternating repeats [5; 2 with --quick]")
    parser.add_argument("--slots", type=int, default=2, help="slots (threads) of each of the two workers [2]")
    parser.add_argument("--broker", choices=["redis", "rabbitmq", "both"], default="both")
    parser.add_argument("--redis-url", default=os.environ.get("SHADHO_TEST_REDIS_URL", "redis://127.0.0.1:6379/13"))
    parser.add_argument("--amqp-url", default=os.environ.get("SHADHO_TEST_AMQP_URL", "amqp://127.0.0.1"))
    given = parser.parse_args()
    trials = given.trials or (1000 if given.quick else 4000)
    repeats = given.repeats or (2 if given.quick else 5)
    if given.quick:
        print(f"--quick: {repeats} repeats of {trials} trials instead of 5 of 4000")

    figures: dict[str, object] = {}
    goals: dict[str, dict[str, object]] = {}
    brokers = {"redis": given.redis_url, "rabbitmq": given.amqp_url}
    for name, url in brokers.items():
        if given.broker in (name, "both"):
            measured = compare(name, url, given.redis_url, trials, repeats, given.slots)
            figures[name] = measured
            goals |= judge(name, measured, trials)
    memory_trials = 25 * trials
    megabytes = memory(memory_trials)
    print(f"\nmemory: a study of {memory_trials:,} no-op trials grows the scheduler by {megabytes:.0f} MB")
    figures["memory_mb"] = megabytes
    goals["memory_mb_per_100k"] = goal(megabytes * 100_000 / memory_trials, at_most=300)
    settings = {"trials": trials, "repeats": repeats, "workers": 2, "slots": given.slots, "quick": given.quick}
    finish(figures, goals, settings)


def compare(broker: str, url: str, redis_url: str, trials: int, repeats: int, slots: int) -> dict[str, list[float]]:
    """Trials per second of every contestant, one value a repeat."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        place = Path(folder)
        (place / "noop_study.py").write_text(NOOP_STUDY)
        (place / "bare.py").write_text(BARE_APP)
        runs: dict[str, Callable[[], float]] = {
            "study": study_runner(place, url, redis_url, trials, slots, stack),
            "bare threads": bare_runner(place, url, redis_url, trials, slots, "threads", stack),
            "bare prefork": bare_runner(place, url, redis_url, trials, slots, "prefork", stack),
        }
        if find_spec("optuna"):
            runs["optuna"] = lambda: optuna(redis_url, trials)
        else:
            print("Optuna is not installed and left out")
        for name, run in runs.items():
            if name != "optuna":  # its processes start anew each time
                run()  # once unmeasured: everything imported, every thread and process started
        measured: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats):
            for name, run in runs.items():
                measured[name].append(trials / run())
            shown = ", ".join(f"{name} {values[-1]:.0f}" for name, values in measured.items())
            print(f"{broker} repeat {repeat + 1}/{repeats}, trials/s: {shown}", flush=True)
    print(f"\n{broker}: trials per second, {trials} no-op trials, 2 workers with {slots} slots each")
    print(f"{'':14s}{'lower':>8s}{'median':>8s}{'upper':>8s}{'study / it':>12s}")
    middle = quartiles(measured["study"])[1]
    for name, values in measured.items():
        low, median, high = quartiles(values)
        print(f"{name:14s}{low:8.0f}{median:8.0f}{high:8.0f}{middle / median:12.2f}")
    return measured


def judge(broker: str, measured: dict[str, list[float]], trials: int) -> dict[str, dict[str, object]]:
    """The goals on one broker: ratios of medians."""
    medians = {name: quartiles(values)[1] for name, values in measured.items()}
    # A short study is mostly start and end.
    wanted = {"bare threads": 1.2 if trials >= 4000 else 0.9, "bare prefork": 0.7} | (
        {"optuna": 2.0} if "optuna" in medians else {}
    )
    return {
        f"{broker}_study_vs_{other.replace(' ', '_')}": goal(medians["study"] / medians[other], at_least=ratio)
        for other, ratio in wanted.items()
    }


def study_runner(
    place: Path, url: str, redis_url: str, trials: int, slots: int, stack: ExitStack
) -> Callable[[], float]:
    """Start two workers; returns what runs one study on them and gives its seconds."""
    environment = {"CELERY_BROKER_URL": url, "SHADHO_REDIS_URL": redis_url, "SHADHO_IMPORTS": "noop_study"}
    command = [
        "-m",
        "celery",
        "-A",
        "shadho_celery",
        "worker",
        "-Q",
        f"overhead-{RUN}",
        "-c",
        str(slots),
        "-l",
        "WARNING",
    ]
    for _ in range(2):
        stack.enter_context(python(place, environment, *command, "--without-gossip", "--without-mingle"))
    arguments = ["-m", "shadho_celery.launch", "noop_study", "--trials", str(trials), "--json", "--store"]

    # Both workers must take part from the first trial on.
    registry = Registry(connect(redis_url), Worker)
    while sum(worker.compute_class == f"overhead-{RUN}" for worker in registry.living().values()) < 2:
        time.sleep(0.1)

    def run() -> float:
        store = f"sqlite:///{place}/{uuid.uuid4().hex}.db"
        with python(place, environment, *arguments, store, stdout=subprocess.PIPE) as process:
            answer = json.loads(process.communicate(timeout=600)[0])
        assert answer["trials"]["complete"] == trials, answer
        return float(answer["seconds"])

    return run


def bare_runner(
    place: Path, url: str, redis_url: str, trials: int, slots: int, pool: str, stack: ExitStack
) -> Callable[[], float]:
    """Start two plain Celery workers; returns what sends them the tasks and gives the seconds until the last ended."""
    environment = {"CELERY_BROKER_URL": url, "SHADHO_REDIS_URL": redis_url, "BARE_QUEUE": f"bare-{pool}-{RUN}"}
    command = ["-m", "celery", "-A", "bare", "worker", "-P", pool, "-c", str(slots), "-l", "WARNING"]
    for i in range(2):
        name = ["-n", f"{pool}{i}@%h", "--without-gossip", "--without-mingle"]
        stack.enter_context(python(place, environment, *command, *name))
    marks = 2 * slots
    send = (
        "import sys, time, bare\n"
        "trials, marks, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]\n"
        "bare.noop.apply_async(('',), ignore_result=True)\n"  # opens the connection
        "began = time.monotonic()\n"
        "for i in range(trials):\n"
        "    bare.noop.apply_async((key if i >= trials - marks else '',), ignore_result=True)\n"
        "while bare.client.llen(key) < marks: time.sleep(0.002)\n"
        "print(time.monotonic() - began)\n"
    )

    def run() -> float:
        key = f"overhead:{uuid.uuid4().hex}"
        arguments = ["-c", send, str(trials), str(marks), key]
        with python(place, environment, *arguments, stdout=subprocess.PIPE) as process:
            seconds = float(process.communicate(timeout=600)[0])
        redis.Redis.from_url(redis_url).delete(key)
        return seconds

    return run


def optuna(redis_url: str, trials: int) -> float:
    """Seconds of a study with Optuna on two processes, their start-up taken off."""
    name = f"overhead-{uuid.uuid4().hex}"

    def seconds(each: int) -> float:
        began = time.monotonic()
        with ExitStack() as stack:
            both = [
                stack.enter_context(python(ROOT, {}, "-c", OPTUNA, redis_url, name + str(each), str(each)))
                for _ in "12"
            ]
            for process in both:
                process.wait(timeout=600)
        return time.monotonic() - began

    started = seconds(1)
    return max(1e-3, seconds(trials // 2) - started)


def memory(trials: int) -> float:
    """MB by which a process grows over a study of `trials` no-op trials on SQLite."""
    with tempfile.TemporaryDirectory() as folder:
        arguments = ["-c", MEMORY, str(trials), f"sqlite:///{folder}/memory.db"]
        with python(Path(folder), {}, *arguments, stdout=subprocess.PIPE) as process:
            return float(process.communicate(timeout=1200)[0])


@contextmanager
def python(
    place: Path, environment: dict[str, str], *arguments: str, stdout: int = subprocess.DEVNULL
) -> Iterator[subprocess.Popen[str]]:
    """A Python process in `place` that is stopped at the end."""
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", *arguments],
        cwd=place,
        env={**os.environ, "PYTHONPATH": f"{ROOT}{os.pathsep}{place}", **environment},
        stdout=stdout,
        stderr=None if os.environ.get("VERBOSE") else subprocess.DEVNULL,
        text=True,
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.terminate()
        try:
            process.wait(timeout=15)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
