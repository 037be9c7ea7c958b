"""Control of running studies and workers by requests, and reading of their trials' logs.

Requests are sent over the Redis of the fleet, or of the embedded fleets of this folder. Logs are read from this folder,
or requested from the workers of a fleet.
"""

from __future__ import annotations

import json
import socket
import threading
import time
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from msgspec.structs import asdict, replace

from shadho_celery.core import records
from shadho_celery.core.checks import as_record, listed, one_line, short
from shadho_celery.core.files import CHECKPOINTS, EMBEDDED, below
from shadho_celery.core.records import MAX_POINTS, Answer, OfStudy, OfWorker
from shadho_celery.core.settings import CHANGEABLE, read_settings
from shadho_celery.core.units import counted
from shadho_celery.core.users import own_user
from shadho_celery.embedded.embedded import CONTROL_KEY, reached, running
from shadho_celery.errors import ServiceError, ShadhoError, StudyNotFound, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.control import (
    CONTROL,
    GRACE_SECONDS,
    MAX_REQUESTS,
    TO_WORKERS,
    VALID_SECONDS,
    Client,
    LeftDeed,
    ReadLog,
    Request,
    Sweep,
    WorkerAnswer,
    worker_of,
)
from shadho_celery.fleet.drains import Drains
from shadho_celery.fleet.policy import Guard, need_right
from shadho_celery.fleet.redis import Redis, connect, refusals
from shadho_celery.fleet.registry import Keys, Registry, StudyWants, Worker, obeyed_drains, one_a_disk, place_of
from shadho_celery.fleet.signing import KEY_FILE, UNSIGNED, UNSIGNED_CONTROL, Signer, read_keys
from shadho_celery.node.logs import answered
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.runner.output import replica_logs
from shadho_celery.scheduler.executors import HOST as IN_PROCESS
from shadho_celery.session import cleaning
from shadho_celery.store.base import DEFAULT_STORE, StudyRecord
from shadho_celery.store.sql import SqlStore

NO_FLEET = (
    "no study runs in this folder with its own workers, and no fleet is named; run this command in the study's folder, "
    f"or name the fleet's Redis in {urls.REDIS}"
)


@dataclass(frozen=True, kw_only=True)
class Reach:
    """A connection to a Redis of running studies and workers, and the keys for it."""

    client: Redis
    #: verifies announcements
    signer: Signer
    #: signs requests and verifies answers
    control: Signer


@contextmanager
def reaches(redis: str | None = None) -> Iterator[Sequence[Reach]]:
    """Yield the fleet's Redis, at the URL `redis` or as the environment names it.

    Without either, yield the Redis of each embedded fleet of this folder, except fleets that are starting or ending.
    Raises ServiceError if the fleet's Redis cannot be reached.
    """
    signer = Signer.configured()
    with ExitStack() as stack:
        if redis or urls.is_fleet({}):
            client = stack.enter_context(connect(redis or urls.url(urls.REDIS)))
            yield [Reach(client=client, signer=signer, control=signer)]
            return
        found = []
        for folder in running():
            # Without a socket or a key, the study is starting or ending.
            with suppress(ServiceError, UsageError):
                named = stack.enter_context(reached(folder))
                client = stack.enter_context(connect(named[urls.REDIS]))
                control = Signer(*read_keys(folder / CONTROL_KEY))
                found.append(Reach(client=client, signer=signer, control=control))
        yield found


#: seconds to wait until workers obey a drain or undrain, and seconds between two checks
ANSWER_SECONDS, LOOK_SECONDS = 10.0, 0.1

#: seconds between two checks whether the study still runs, while an answer is awaited
STUDY_SECONDS = 1.0

#: maximum number of workers or studies that an error lists
LISTED = 5


class AtRest(UsageError):
    """The study does not run."""


class Control:
    """Sends requests to the running studies and workers of a fleet, or of the embedded fleets of this folder.

    Each method waits a limited time for the answer and returns it: `is_done` is False if the request was refused, and
    `text` describes the result. `study` is the study's name, or the beginning of its name if no other running study's
    name begins like this. The methods raise ShadhoError if there is no such study or worker, or if it does not answer.
    """

    def __init__(self, *, redis: str | None = None, store: str = DEFAULT_STORE) -> None:
        """Use the fleet's Redis at the URL `redis`, by default the Redis that the environment names.

        Without either, use the embedded fleets of the working directory. The `store` is only read to explain in an
        error why a study does not run.
        """
        self._redis, self._store = redis, store

    def act(self, deed: OfStudy | OfWorker | records.Clean, study: str = "") -> Answer:
        """Request an action of this `study`, or of the worker that `deed` names. Return the answer."""
        match deed:
            case records.Drain(worker):
                return self.drain(worker)
            case records.Undrain(worker):
                return self.undrain(worker)
            case records.Clean(studies, is_sure):
                return self.clean(*studies, is_sure=is_sure)
            case records.Enqueue(points):
                deed = records.Enqueue([_as_json(index, point) for index, point in enumerate(points)])
                if not 0 < len(deed.points) <= MAX_POINTS:
                    raise UsageError(f"there are {len(deed.points)} points; give 1 to {MAX_POINTS} at a time")
            case records.Set(settings):
                if not settings:
                    raise UsageError(f"no setting is given; these can change: {', '.join(CHANGEABLE)}")
                read_settings(settings)
            case records.Note():
                return self._note(study, as_record(asdict(deed), records.Note, "note"))
        return self._ask(study, deed)

    def stop(self, study: str) -> Answer:
        """Let the study send no more trials, and end once its running trials have finished, as after one Ctrl-C."""
        return self.act(records.Stop(), study)

    def pause(self, study: str) -> Answer:
        """Let the study start no more trials until `unpause`. Running trials finish."""
        return self.act(records.Pause(), study)

    def unpause(self, study: str) -> Answer:
        """Let a paused study start trials again."""
        return self.act(records.Unpause(), study)

    def cancel(self, study: str, number: int) -> Answer:
        """Stop the trial with this number. It ends CANCELLED, and does not count towards the limit on trials."""
        return self.act(as_record({"number": number}, records.Cancel, "trial"), study)

    def enqueue(self, study: str, points: Iterable[object]) -> Answer:
        """Let the study run known points next. Each point is a mapping of labels to values, as for `minimize`."""
        return self.act(records.Enqueue([*points]), study)

    def set(self, study: str, **settings: Any) -> Answer:
        """Change settings of a running study: trials, seconds, target, early_stop, weight or trial_timeout.

        The new values also apply to later runs of the study. `trial_timeout` applies only to trials that are sent from
        now on.
        """
        return self.act(records.Set(settings), study)

    def note(self, study: str, text: str, trial: int | None = None) -> Answer:
        """Record a note on the study, or on the trial with this number, whether or not the study runs."""
        return self.act(records.Note(text, trial), study)

    def _note(self, name: str, deed: records.Note) -> Answer:
        with suppress(AtRest):
            return self._ask(name, deed)
        answer, now = Answer(is_done=True, text="noted"), time.time()
        facts: dict[str, Any] = {"id": uuid.uuid4().hex, "by": own_user(), "arguments": asdict(deed)}
        with closing(SqlStore(self._store)) as store:
            record = _recorded(store, name)
            self.check_owner(record.owner)
            if deed.trial is not None:
                StudyResults(store, record).trial(deed.trial)
            store.note(record.key, now, records.Action(action="note", at=now, answer=answer, **facts))
        return answer

    def check_owner(self, owner: str | None) -> None:
        """Raise UsageError if the fleet has a policy, and this user may not act on studies of `owner`.

        Call this before a study that does not run is changed. The scheduler of a running study checks requests itself.
        """
        with reaches(self._redis) as found, refusals():
            for reach in found:
                self._need_right(reach, owner)

    def drain(self, worker: str) -> Answer:
        """Let a worker finish its trials and take no more, until `undrain`.

        `worker` is a place, which is the part of a worker's name that stays the same when the worker restarts, such as
        cpu@node7. It then means all workers of that place, including workers that start later. `worker` may also be a
        full name. If other live workers have the same place, only the named worker is drained. Otherwise the place is
        drained.
        """
        with reaches(self._redis) as found, refusals():
            reach, place, workers = _place(found, worker)
            guard = self._need_right(reach)
            for name, each in workers.items():
                if (reason := why_not(f"worker {name}", each, reach.control)) is not None:
                    return Answer(is_done=False, text=reason)
            # A drain that is not an admin's, such as one from before the policy, is put again.
            drains, obeyed = Drains(reach.client, reach.control, guard), obeyed_drains(workers).get(place, 0)
            drain = drains.latest(place)
            # If the record is older than the one that the workers obey, it is a copy that somebody has written again,
            # and does not count.
            if drain is not None and drain.is_drained and drain.sequence >= obeyed:
                return Answer(is_done=True, text=f"{place} was already drained by {one_line(drain.by)}")
            if alone := place in workers:
                living = Registry(reach.client, Worker, reach.signer).living()
                drains.forget([name for name, each in drains.all().items() if each.alone and name not in living])
            drains.put(place, own_user(), is_drained=True, after=obeyed, alone=alone)
            workers = _await(reach, place, is_drained=True)
        running = sum(worker.busy for worker in workers.values())
        rest = f"; {counted(running, 'running trial finishes', 'running trials finish')} first" if running else ""
        return Answer(is_done=True, text=f"drained {place}: it takes no more trials{rest}")

    def undrain(self, worker: str) -> Answer:
        """Let a worker take trials again. `worker` is as in `drain`."""
        with reaches(self._redis) as found, refusals():
            reach, place, workers = _place(found, worker, with_gone=True)
            self._need_right(reach)
            drains, obeyed = Drains(reach.client, reach.control), obeyed_drains(workers)
            drained = drains.all(obeyed).keys()
            if place in workers and (whole := place_of(place)) in drained:
                return Answer(is_done=False, text=f"all workers of {whole} are drained; undrain it")
            # The workers may also obey a drain whose record Redis has lost.
            if place not in drained and not any(each.drained for each in workers.values()):
                return Answer(is_done=True, text=f"{place} was not drained")
            for each in (place, *(workers.keys() & drained - {place})):
                after, alone = obeyed.get(each, 0), each in workers
                drains.put(each, own_user(), is_drained=False, after=after, alone=alone)
            if not workers:
                return Answer(is_done=True, text=f"undrained {place}, where no worker is live")
            _await(reach, place, is_drained=False)
        return Answer(is_done=True, text=f"undrained {place}: it takes trials again")

    def clean(self, *studies: str, is_sure: bool = False) -> Answer:
        """Let the live workers delete the folders of checkpoints that studies do not need, if `is_sure`.

        Otherwise the answer lists them with their sizes, and `is_done` is False if there are any. `studies` are names
        of studies in the store, by default all of them, or keys of studies that are not in the store.
        """
        with reaches(self._redis) as found, refusals():
            held = {key for reach in found for key in Registry(reach.client, StudyWants, reach.signer).living()}
            # A scheduler may have been killed while its trials run on. Therefore a study that is named by its key must
            # not be announced by workers either. Other studies are not checked, because announcements are seconds old.
            announced = [Registry(reach.client, Worker, reach.signer).living() for reach in found]
            busy = {key for workers in announced for each in workers.values() for key in each.studies}
            busy |= {folder.name for folder in running()}
            with closing(SqlStore(self._store, read_only=True)) as store:
                plan = cleaning.plan(store, studies, held | busy.intersection(studies))
            sweep = Sweep(studies={key: trials for key, (_, trials) in plan.items()}, is_sure=is_sure)
            if self._redis or urls.is_fleet({}):
                [reach] = found
                if is_sure:
                    self._need_right(reach)
                living = Registry(reach.client, Worker, reach.signer).living()
                ours = reach.control.fingerprint
                # `one_a_disk` takes the last worker of each disk, so workers with this command's key come last.
                disks = one_a_disk(dict(sorted(living.items(), key=lambda each: each[1].obeys(ours))))
                swept: dict[str, WorkerAnswer | None] = dict.fromkeys(disks)
                sender = Client(reach.client, reach.control, TO_WORKERS)
                asked = sender.ask([each for each in disks if living[each].obeys(ours)], own_user(), sweep)
                swept |= {worker_of(each): answer for each, answer in sender.answers(asked, cleaning.ANSWER_SECONDS)}
            else:
                swept = {"this folder": answered(CHECKPOINTS, sweep)}
        *others, last = cleaning.lines(plan, swept, is_sure=is_sure)
        return Answer(is_done=is_sure or last.startswith("nothing"), text="\n".join([*others, last]))

    def _need_right(self, reach: Reach, owner: str | None = "") -> Guard | None:
        """Raise UsageError if the fleet has a policy, and this user is no admin and not `owner`. Return what checks its
        records.
        """
        return need_right(reach.client, owner) if self._redis or urls.is_fleet({}) else None

    def _ask(self, name: str, deed: OfStudy) -> Answer:
        """Send a request to the scheduler of a study, and return the answer. Raises ShadhoError if there is none."""
        with reaches(self._redis) as found, refusals():
            reach, key, study = self._study(found, name)
            what = f"study {one_line(study.name or key, 80)}"
            if (reason := why_not(what, study, reach.control)) is not None:
                return Answer(is_done=False, text=reason)
            client = Client(reach.client, reach.control, CONTROL)
            request = client.request(key, own_user(), deed, study.fence)
            try:
                entry = client.send(request)
            except ValueError as error:
                raise UsageError(f"the request is too long: {error}") from None
            if entry is None:
                raise ServiceError(
                    f"the scheduler of {what} has not read {MAX_REQUESTS} earlier requests, so this one was not sent; "
                    "see whether it hangs"
                )
            answer = _awaited(reach, client, request, entry, what)
            # Name the study, because the user has given only the beginning of its name, or its key.
            return answer if name == study.name else replace(answer, text=f"{what}: {answer.text}")

    def _study(self, found: Sequence[Reach], name: str) -> tuple[Reach, str, StudyWants]:
        """Return the Redis, the key and the announcement of a running study. Raises ShadhoError unless exactly one is
        meant.
        """
        if not isinstance(name, str):
            raise UsageError(f"a study's name is a text, not {short(name, 60)}")
        registries = [(reach, Registry(reach.client, StudyWants, reach.signer)) for reach in found]
        running = [(reach, key, study) for reach, each in registries for key, study in each.living().items()]
        meant = [each for each in running if name in (each[2].name, each[1])]
        if not meant and name and not self._is_stored(name):
            meant = [each for each in running if each[2].name.startswith(name)]
        if len(meant) == 1:
            return meant[0]
        if meant:
            names = sorted(one_line(study.name, 80) for _, _, study in meant)
            raise UsageError(f"{len(meant)} running studies are called {one_line(name, 80)!r}: {listed(names, LISTED)}")
        refused = sum(each.refused for _, each in registries)
        raise self._absent(
            name, sorted(one_line(study.name, 80) for _, _, study in running), refused, is_reached=bool(found)
        )

    def _is_stored(self, name: str) -> bool:
        """Return whether the store has a study with exactly this name, so that it does not abbreviate another name."""
        with suppress(ShadhoError), closing(SqlStore(self._store, read_only=True)) as store:
            return store.find(name).name == name
        return False

    def _absent(self, name: str, running: Sequence[str], refused: int, *, is_reached: bool) -> ShadhoError:
        """Return the error for a study that is not in `running`. `refused` is the number of ignored announcements."""
        shown, unknown = one_line(name, 80), ""
        try:
            store = SqlStore(self._store, read_only=True)
            record = _recorded(store, name)
            holder = store.holder(record.key, time.time())
            where = "name its fleet's Redis, or run this command in its folder"
            if holder is not None:
                return ServiceError(
                    f"the scheduler of study {record.name} runs on {holder}; {_other_key(refused) or where}"
                )
            if record.is_simulated:
                return AtRest(f"study {record.name} was simulated, so there is nothing to steer")
            return AtRest(
                f"study {record.name} does not run: it has ended or was interrupted; shadho-celery resume "
                f"{record.name} continues it"
            )
        except ShadhoError as error:
            unknown = f"{error}; " if isinstance(error, StudyNotFound) else ""
        if not is_reached:
            return ServiceError(unknown + NO_FLEET)
        others = f"running studies: {listed(running, LISTED)}" if running else "none runs"
        others += f"; {_other_key(refused)}" if refused else ""
        return UsageError(f"no running study is called {shown!r}; {others}; see shadho-celery status")


def _recorded(store: SqlStore, name: str) -> StudyRecord:
    """Return the study with this key or name. Raises StudyNotFound."""
    return next((each for each in store.records() if each.key == name), None) or store.find(name)


def _as_json(index: int, point: object) -> object:
    """Return a known point as JSON represents it. Raises UsageError with its `index` and the label that is not
    possible.
    """
    found: dict[str, object] = {}
    for label, value in point.items() if isinstance(point, Mapping) else [("", point)]:
        try:
            found |= json.loads(json.dumps({label: value}, allow_nan=False))
        except (TypeError, ValueError, RecursionError):
            named = f"{short(label, 60)}: " if isinstance(point, Mapping) else ""
            raise UsageError(f"point {index}: {named}{short(value, 60)} cannot be written as JSON") from None
    return found if isinstance(point, Mapping) else found[""]


def _other_key(refused: int) -> str:
    """Return the remedy for announcements that are not signed with our key, or "" if there are none."""
    if not refused:
        return ""
    return f"announcements with another signing key than this command's: {refused}; give the fleet's --signing-key-file"


def why_not(what: str, keys: Keys, signer: Signer) -> str | None:
    """Return why `what` would refuse requests that `signer` signs, or None. `keys` are those that `what` announces."""
    if keys.control is None:
        return (
            f"{what} refuses control because it has no signing key; start it with --signing-key-file ({KEY_FILE}), or "
            f"with --allow-unsigned-control ({UNSIGNED_CONTROL}=1)"
        )
    if not keys.obeys(signer.fingerprint):
        return f"{what} obeys requests with another signing key; give its --signing-key-file"
    return None


def _place(found: Sequence[Reach], worker: str, *, with_gone: bool = False) -> tuple[Reach, str, Mapping[str, Worker]]:
    """Return the Redis of the place that `worker` means (see `Control.drain`), the place, and its live workers by name.

    If `worker` is the full name of one of several workers there, it is returned instead of the place. With `with_gone`,
    a drained place without a live worker is found too. Raises UsageError unless exactly one place is meant.
    """
    if not found:
        raise ServiceError(NO_FLEET)
    matches, known, refused = [], set[str](), 0
    for reach in found:
        registry = Registry(reach.client, Worker, reach.signer)
        living = registry.living()
        refused += registry.refused
        places = {place_of(name) for name in living}
        if with_gone:
            places |= Drains(reach.client, reach.control).all().keys()
        known |= places
        place = place_of(worker) if worker in living else worker
        if place in places:
            there = {name: each for name, each in living.items() if place_of(name) == place}
            is_one_of_several = worker in living and len(there) > 1
            matches.append((reach, worker, {worker: living[worker]}) if is_one_of_several else (reach, place, there))
    if not matches:
        names = [one_line(each, 80) for each in sorted(known)]
        some = f"there are {listed(names, LISTED)}" if names else "none is live"
        some += f"; {_other_key(refused)}" if refused else ""
        raise UsageError(f"no live worker is {one_line(worker, 80)!r}; {some}; see shadho-celery status")
    if len(matches) > 1:
        raise UsageError(f"{len(matches)} studies of this folder have a worker {worker!r}; give the worker's full name")
    return matches[0]


def _awaited(reach: Reach, client: Client[OfStudy, Answer], request: Request, entry: str, what: str) -> Answer:
    """Wait for the answer to a request and return it. Raises ServiceError if none arrives in time, or if the study
    ends.
    """
    registry, deadline = Registry(reach.client, StudyWants, reach.signer), time.monotonic() + VALID_SECONDS
    while (answer := client.wait(request, STUDY_SECONDS)) is None and time.monotonic() < deadline + GRACE_SECONDS:
        if request.to not in registry.living():
            raise ServiceError(f"{what} ended before its scheduler answered")
        if time.monotonic() >= deadline and client.take_back(request, entry):
            raise ServiceError(
                f"the scheduler of {what} has not read the request within {VALID_SECONDS:.0f} s, so nothing was "
                "changed; see whether it hangs"
            )
    if answer is None:
        raise ServiceError(
            f"the scheduler of {what} has read the request but has not answered, for example because its store cannot "
            "be reached; see shadho-celery status for what has become of it"
        )
    return answer


def _await(reach: Reach, place: str, *, is_drained: bool) -> Mapping[str, Worker]:
    """Wait until all live workers of a place, or the worker with this name, announce that they are drained or
    undrained.

    Return these workers by name. Raises ServiceError if one of them does not announce it within ANSWER_SECONDS.
    """
    registry, deadline = Registry(reach.client, Worker, reach.signer), time.monotonic() + ANSWER_SECONDS
    while True:
        there = {name: worker for name, worker in registry.living().items() if place in (name, place_of(name))}
        late = [name for name, worker in there.items() if worker.drained != is_drained]
        if not late:
            return there
        if time.monotonic() > deadline:
            raise ServiceError(
                f"worker {late[0]} has not confirmed it within {ANSWER_SECONDS:.0f} s; it obeys once it reads this "
                "from Redis: see its log, and shadho-celery status"
            )
        time.sleep(LOOK_SECONDS)


#: seconds to wait for workers' answers to requests for logs
LOG_SECONDS = 10.0


class NotLeft(ServiceError):
    """The log or folder of a trial is neither in this folder nor on a worker that answers."""

    def __init__(self, reason: str, *, is_error: bool = True) -> None:
        """`is_error` is False if the log or folder certainly does not exist."""
        super().__init__(reason)
        self.is_error = is_error


class TrialLogs:
    """Reads logs and files of trials in this folder, or, if they are not here, on the workers of a fleet."""

    def __init__(self, *, is_fleet: bool = False, seconds: float = LOG_SECONDS) -> None:
        """With `is_fleet`, use the fleet's Redis and signing key that the environment names at this moment.

        The connection to Redis is opened for the first request that this folder cannot answer. Wait at most `seconds`
        for workers' answers.
        """
        self._url, self._seconds = urls.url(urls.REDIS) if is_fleet else "", seconds
        self._signer = Signer.configured() if is_fleet else UNSIGNED
        #: connection to Redis, and the registry of workers there; None until they are needed
        self._fleet: tuple[Redis, Registry[Worker]] | None = None
        self._lock = threading.Lock()

    def read(
        self, study: StudyResults, trial: TrialResult, attempt: int, after: int = 0, source: str | None = None
    ) -> tuple[WorkerAnswer, str | None]:
        """Return the part of a log from position `after` on, and its source, as `ask` does."""
        hosts = {row["attempt"]: row["host"] for row in study.records.of_trial(trial.number)}
        host, number = hosts.get(attempt) or trial.host, trial.number
        nothing = f"trial {number} has printed nothing"
        if host == IN_PROCESS:
            nothing = f"trial {number} ran in the process of its search, whose output is not kept"
        deed = ReadLog(study=study.key, number=number, attempt=attempt, after=after)
        return self.ask(deed, host, f"the log of trial {number}", nothing, source)

    def of_replicas(self, study: str, number: int, attempt: int) -> list[Path]:
        """Return the log files of an attempt's other replicas or ranks that are in this folder."""
        return replica_logs(CHECKPOINTS, study, number, attempt)

    def ask(
        self, deed: LeftDeed, host: str | None, what: str, nothing: str, source: str | None = None
    ) -> tuple[WorkerAnswer, str | None]:
        """Return the answer to a request, and the worker that has given it; None for this folder. Any thread may call
        this.

        In messages, `what` names the requested log or folder, and `nothing` says that the trial has not left it.
        `source` is the source of the previous answer. Raises NotLeft, UsageError if the log or folder cannot be read,
        and ServiceError if the fleet's Redis fails.
        """
        here = WorkerAnswer() if source else answered(CHECKPOINTS, deed)
        if here.is_done:
            return here, None
        if here.problem:
            raise UsageError(f"{what} cannot be read: {here.problem}")
        if host == IN_PROCESS:
            raise NotLeft(nothing, is_error=False)
        if not self._url and host in {None, socket.gethostname()}:
            # The state of an embedded study is in the folder in which all of its trials run.
            is_here = below(EMBEDDED, deed.study).is_dir()
            raise NotLeft(f"{nothing}{'' if is_here else ', or ran in another folder'}", is_error=False)
        if not self._url:
            where = "give --redis to ask the workers there, or run this command there in the workers' folder"
            raise NotLeft(f"{nothing}, or {what} is on {host}; {where}")
        return self._of_workers(deed, host, what, nothing, source)

    def _of_workers(
        self, deed: LeftDeed, host: str | None, what: str, nothing: str, source: str | None
    ) -> tuple[WorkerAnswer, str]:
        with refusals():
            with self._lock:
                if self._fleet is None:
                    client = connect(self._url)
                    self._fleet = client, Registry(client, Worker, self._signer)
                client, registry = self._fleet
                announced, refused = registry.living(), registry.refused
            living = {name: worker for name, worker in announced.items() if worker.knows(self._signer.fingerprint)}
            strangers = refused + len(announced) - len(living)
            on_host = [name for name, worker in living.items() if worker.machine.host == host]
            # If no worker is live on the host, ask one worker for each disk, because disks may be shared.
            asked = [source] if source in living and source else on_host or one_a_disk(living)
            sender = Client(client, self._signer, TO_WORKERS)
            sent = sender.ask(asked, own_user(), deed)
            others: list[WorkerAnswer] = []
            for request, answer in sender.answers(sent, self._seconds):
                if answer.is_done:
                    return answer, worker_of(request)
                others.append(answer)
        if problem := next((each.problem for each in others if each.problem), ""):
            raise NotLeft(f"{what} cannot be read: {one_line(problem, 300)}")
        if strangers and not others:
            raise NotLeft(
                f"{strangers} workers have another key, or only one side signs; give the fleet's --signing-key-file"
            )
        if not on_host:
            raise NotLeft(f"no worker is live on {host}, where {what} is; start one there in the same folder")
        if not sent:
            raise NotLeft(f"the workers on {host} have not read {MAX_REQUESTS} earlier requests; try again later")
        if not others:
            seconds = f"{self._seconds:.0f} s"
            raise NotLeft(f"no worker on {host} has answered within {seconds}; check that it runs, and try again")
        raise NotLeft(f"{nothing}, or its worker on {host} ran in another folder than the current ones", is_error=False)

    def close(self) -> None:
        """Close the connection to the fleet."""
        if self._fleet is not None:
            self._fleet[0].close()
