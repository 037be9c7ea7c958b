"""What the search costs beside the trials: ``python tests/benchmarks/overhead.py [--quick]``.

A study of no-op trials on two worker processes, on Redis and on RabbitMQ, beside

- bare Celery: as many no-op tasks sent with ``apply_async``, on the same pool (threads), ack mode and concurrency, and
  on the prefork pool, timed from the first publish to the last task's end;
- Optuna: Redis journal, random sampler, two processes.

All of them alternate within one run, so the ratios are of figures measured side by side. And the memory that a
scheduler grows by over 25 times as many no-op trials.

With ``--part command``, only what a trial of a command takes beside `subprocess.run` of the same command in a function.
"""

from __future__ import annotations

import resource
import subprocess
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import redis
from figures import ROOT, finish, goal, make_parser, quartiles, show
from workers import RUN, Fleet, lent_redis, python

#: workers of each contestant
WORKERS = 2

#: a study file whose trials do nothing
# The store's libraries are loaded before the run begins, as those of the other contestants are.
NOOP_STUDY = """
import shadho_celery.store.sql
from hyperopt import hp
SPACE = {"x": hp.uniform("x", 0, 1)}
STUDY = {"sampler": "random"}
def objective(params):
    return params["x"]
"""

#: study files whose trials run one command: as their objective, and in a function
COMMAND = ["sh", "-c", "echo loss=1"]
COMMAND_STUDIES = {
    "command": f"""
from hyperopt import hp
SPACE = {{"x": hp.uniform("x", 0, 1)}}
STUDY = {{"sampler": "random", "command": {COMMAND}, "loss": "loss"}}
""",
    "function": f"""
import subprocess
from hyperopt import hp
SPACE = {{"x": hp.uniform("x", 0, 1)}}
STUDY = {{"sampler": "random"}}
def objective(params):
    run = subprocess.run({COMMAND}, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True)
    return float(run.stdout.partition("=")[2])
""",
}

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

#: sends so many tasks, of which the last ones leave a mark, and prints the seconds until all of these are left
SEND = """
import sys, time, bare
trials, marks, key = int(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
bare.noop.apply_async(("",), ignore_result=True)  # opens the connection
began = time.monotonic()
for i in range(trials):
    bare.noop.apply_async((key if i >= trials - marks else "",), ignore_result=True)
while bare.client.llen(key) < marks: time.sleep(0.002)
print(time.monotonic() - began)
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
    parser = make_parser(__doc__)
    parser.add_argument("--quick", action="store_true", help="fewer repeats and trials; for a first look")
    parser.add_argument("--trials", type=int, help="trials of a study [4000; 1000 with --quick]")
    parser.add_argument("--repeats", type=int, help="alternating repeats [5; 2 with --quick]")
    parser.add_argument("--slots", type=int, default=2, help="slots (threads) of each of the two workers [2]")
    parser.add_argument("--broker", choices=["redis", "rabbitmq", "both"], default="both")
    parser.add_argument("--redis-url", help="broker and channel [a database lent by tests/services]")
    parser.add_argument("--amqp-url", default="amqp://127.0.0.1", help="the other broker [amqp://127.0.0.1]")
    parser.add_argument("--part", choices=["studies", "command"], default="studies")
    given = parser.parse_args()
    if given.part == "command":
        of_commands(given.trials or 200, given.repeats or 3, given.redis_url)
        return
    trials = given.trials or (1000 if given.quick else 4000)
    repeats = given.repeats or (2 if given.quick else 5)

    figures: dict[str, object] = {}
    goals: dict[str, dict[str, object]] = {}
    with lent_redis(given.redis_url) as redis_url:
        for broker, url in {"redis": redis_url, "rabbitmq": given.amqp_url}.items():
            if given.broker in (broker, "both"):
                figures[broker] = measured = compare(broker, url, redis_url, trials, repeats, given.slots)
                goals |= judge(broker, measured, trials)
    memory_trials = 25 * trials
    megabytes = memory(memory_trials)
    print(f"memory: a study of {memory_trials:,} no-op trials grows the scheduler by {megabytes:.0f} MB")
    figures["memory_mb"] = megabytes
    goals["memory_mb_per_100k"] = goal(megabytes * 100_000 / memory_trials, at_most=300)
    finish(figures, goals, {**vars(given), "trials": trials, "repeats": repeats, "workers": WORKERS})


def of_commands(trials: int, repeats: int, redis_url: str | None) -> None:
    """Measure the seconds of trials on one slot, and print."""
    measured: dict[str, list[float]] = {name: [] for name in COMMAND_STUDIES}
    with lent_redis(redis_url) as url, Fleet({"overhead": 1}, url, url, **COMMAND_STUDIES) as fleet:
        for _ in range(repeats):
            for name in measured:
                measured[name] += (trial["seconds"] for trial in fleet.run(name, "--trials", str(trials)).trials)
    milliseconds = {name: [1000 * value for value in quartiles(values)] for name, values in measured.items()}
    texts = {
        name: dict(zip(("lower", "median", "upper"), (f"{value:.1f}" for value in values), strict=True))
        for name, values in milliseconds.items()
    }
    show(texts, "objective", f"milliseconds of a trial that runs {' '.join(COMMAND)}")
    more = milliseconds["command"][1] - milliseconds["function"][1]
    finish(
        {"milliseconds": milliseconds},
        {"command_ms_beside_subprocess_run": goal(more, at_most=20)},
        {"trials": trials, "repeats": repeats},
    )


def compare(broker: str, url: str, redis_url: str, trials: int, repeats: int, slots: int) -> dict[str, list[float]]:
    """Trials per second of every contestant, one value a repeat."""
    with ExitStack() as stack:
        place = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (place / "bare.py").write_text(BARE_APP)
        fleet = stack.enter_context(Fleet({"overhead": slots}, url, redis_url, each=WORKERS, noop_study=NOOP_STUDY))

        def study() -> float:
            report = fleet.run("noop_study", "--trials", str(trials)).report
            assert report["trials"]["complete"] == trials, report
            return float(report["seconds"])

        runs: dict[str, Callable[[], float]] = {
            "study": study,
            "bare threads": bare_runner(place, url, redis_url, trials, slots, "threads", stack),
            "bare prefork": bare_runner(place, url, redis_url, trials, slots, "prefork", stack),
            "optuna": lambda: optuna(redis_url, trials),
        }
        for name, run in runs.items():
            if name != "optuna":  # its processes start anew each time
                run()  # once unmeasured: everything imported, every thread and process started
        measured: dict[str, list[float]] = {name: [] for name in runs}
        for repeat in range(repeats):
            for name, run in runs.items():
                measured[name].append(trials / run())
            shown = ", ".join(f"{name} {values[-1]:.0f}" for name, values in measured.items())
            print(f"{broker} repeat {repeat + 1}/{repeats}, trials/s: {shown}", flush=True)
    middle = quartiles(measured["study"])[1]
    texts = {}
    for name, values in measured.items():
        lower, median, upper = (f"{each:.0f}" for each in quartiles(values))
        share = f"{middle / quartiles(values)[1]:.2f}"
        texts[name] = {"lower": lower, "median": median, "upper": upper, "study / it": share}
    show(texts, broker, f"trials per second, {trials} no-op trials, {WORKERS} workers with {slots} slots each")
    return measured


def judge(broker: str, measured: Mapping[str, Sequence[float]], trials: int) -> dict[str, dict[str, object]]:
    """The goals on one broker: ratios of medians."""
    medians = {name: quartiles(values)[1] for name, values in measured.items()}
    # A short study is mostly start and end.
    wanted = {"bare threads": 1.2 if trials >= 4000 else 0.9, "bare prefork": 0.7, "optuna": 2.0}
    return {
        f"{broker}_study_vs_{other.replace(' ', '_')}": goal(medians["study"] / medians[other], at_least=ratio)
        for other, ratio in wanted.items()
    }


def bare_runner(
    place: Path, url: str, redis_url: str, trials: int, slots: int, pool: str, stack: ExitStack
) -> Callable[[], float]:
    """Start plain Celery workers; returns what sends them the tasks and gives the seconds until the last ended."""
    environment = {"CELERY_BROKER_URL": url, "SHADHO_REDIS_URL": redis_url, "BARE_QUEUE": f"bare-{pool}-{RUN}"}
    command = ["-m", "celery", "-A", "bare", "worker", "-P", pool, "-c", str(slots), "-l", "WARNING"]
    for i in range(WORKERS):
        name = ["-n", f"{pool}{i}@%h", "--without-gossip", "--without-mingle"]
        stack.enter_context(python(place, environment, *command, *name))

    def run() -> float:
        key = f"overhead:{uuid.uuid4().hex}"
        arguments = ["-c", SEND, str(trials), str(WORKERS * slots), key]
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


if __name__ == "__main__":
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    main()
