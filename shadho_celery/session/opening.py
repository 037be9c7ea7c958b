"""Opening of a study, which is the same however it is run: settings, plan, store, warm start, lock and scheduler."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import as_record
from shadho_celery.core.settings import (
    BUDGETS,
    DEFAULT_TRIALS,
    Resume,
    StudySettings,
    continued,
    other_sampler,
    read_settings,
)
from shadho_celery.core.trial import Trial, refuse_others
from shadho_celery.errors import StoreOutage, UsageError
from shadho_celery.fidelity.ladder import ladder_of
from shadho_celery.fidelity.pruners import Pruning
from shadho_celery.results.study import OnTrial, RunningStudy, TrialCallback
from shadho_celery.results.warm_start import WarmStart, WarmStartSource, fit, read_source
from shadho_celery.scheduler import known_points
from shadho_celery.scheduler.executors import Executor
from shadho_celery.scheduler.plan import Plan, make_scheduler
from shadho_celery.scheduler.scheduler import Scheduler
from shadho_celery.session.tracking import chosen
from shadho_celery.space.compile import compile_space
from shadho_celery.space.schema import Schema
from shadho_celery.space.space import Space
from shadho_celery.space.stored import ValuesRecord, read_schema, to_json
from shadho_celery.store.base import DEFAULT_STORE
from shadho_celery.store.memory import LateStore
from shadho_celery.study.open import earlier_study, open_study
from shadho_celery.study.state import Limits, StudyState

if TYPE_CHECKING:
    from shadho_celery.store.sql import SqlStore


class Names(Struct, frozen=True, kw_only=True):
    """Arguments that identify a study, checked. Error messages show their descriptions."""

    store: Annotated[str, Meta(description="a database URL such as sqlite:///shadho.db")]
    study: Annotated[str | None, Meta(description="name of the study")]
    resume: Annotated[Resume, Meta(description='True to continue `study`, "if-exists" to begin it the first time')]
    seed: Annotated[int | None, Meta(description="a whole number from 0 to 2**63 - 1")]


@dataclass(frozen=True, kw_only=True)
class Given:
    """Settings and names that a user gives for a run of a study."""

    #: settings for this run, which override those of the study file and of earlier runs
    given: Mapping[str, Any] = field(default_factory=dict)
    #: database URL of the store
    store: str = DEFAULT_STORE
    #: name of the study in its store; None for a generated name, or for the module's latest study with `resume`
    name: str | None = None
    resume: Resume = False
    seed: int | None = None
    #: known points, which run first
    points: Sequence[object] = ()
    #: source of earlier studies' results to learn from; None for no warm start
    warm_start: WarmStartSource | None = None

    @property
    def secret_urls(self) -> list[str]:
        """URLs whose passwords must not be in the environment of trials."""
        return [self.store, *([self.warm_start] if isinstance(self.warm_start, str) else [])]

    def __post_init__(self) -> None:
        as_record({"store": self.store, "study": self.name, "resume": self.resume, "seed": self.seed}, Names)


@dataclass(frozen=True, kw_only=True)
class Request(Given):
    """Everything that is needed to open a study."""

    #: search space, a hyperopt expression
    space: object
    #: module of the study file; "" for a study that a program runs without a file
    module: str = ""
    #: settings in the study file
    stated: Mapping[str, Any] = field(default_factory=dict)
    #: limits of the run; None for the limits in the settings
    limits: Limits | None = None
    #: key of a new study whose embedded fleet was started before it; else None
    key: str | None = None


def settle(request: Request, earlier: Mapping[str, Any], in_force: Mapping[str, Any]) -> StudySettings:
    """Return the settings in force for a run. Raises UsageError for invalid settings.

    The value of a setting is the first of these that exists: given for this run, given for an earlier run (`earlier`),
    written in the study file, in force in the previous run (`in_force`), default.
    """
    given = {**request.stated, **earlier, **request.given}
    own = {*BUDGETS} if request.module or not given.keys().isdisjoint(BUDGETS) else set[str]()
    # The losses and the command of a module are those in its file, even if the previous run had others.
    own |= {"objectives", "command"} if request.module or "direction" in given else set()
    before = {name: value for name, value in continued(in_force, given).items() if name not in own}
    settings = read_settings({**before, **given})
    settings = replace(settings, shares=settings.shares_in_force)
    refuse_others(settings.objectives, in_force)
    ends = settings.trials, settings.seconds, settings.target, settings.early_stop, settings.max_cost
    is_endless = all(each is None for each in ends)
    return replace(settings, trials=DEFAULT_TRIALS) if is_endless and request.limits is None else settings


class Opening:
    """Opening of a study: its request, and the plan that follows from its settings."""

    def __init__(self, request: Request) -> None:
        """Check settings, known points and warm start. Nothing is opened yet. Raises ShadhoError."""
        self._request = request
        #: empty schema of a study without a declared space, whose objective asks for its labels
        self._schema = None if request.space is not None else Schema()
        space = compile_space(request.space) if self._schema is None else self._schema.space()
        where = {**request.stated, **request.given}.get("where")
        if self._schema is not None and where is not None:
            raise UsageError(
                "without a space, a study has no where, because its labels are not known yet; give a space"
            )
        try:
            self.plan = Plan.of(space, settle(request, {}, {}), request.limits)
        except UsageError as error:
            # The message begins with the name of the setting.
            if not str(error).startswith(tuple(request.stated.keys() - request.given.keys())):
                raise
            raise UsageError(f"{request.module}: {error}") from None
        self.plan.check_sampler()
        chosen(self.plan.settings, request.store)
        # The labels of points without a space are not known yet.
        known_points.completed(self.plan, request.points if self._schema is None else [{} for _ in request.points])
        self.plan.check_warm_start(request.warm_start, resume=request.resume is True)

    def open(self, check_owner: Callable[[str | None], None] | None = None) -> OpenStudy:
        """Open the store, and begin or resume the study. Raises ShadhoError.

        `check_owner` raises it if this user may not resume a study of the given owner.
        """
        request, plan, schema = self._request, self.plan, self._schema
        kept: dict[str, Any] = {"module": request.module, "settings": request.given if request.module else None}
        kept |= {"tree": to_json(plan.space, schema), "resume": request.resume}
        with ExitStack() as opened:
            store = open_store(request.store)
            opened.callback(store.close)
            warm_start = None
            if request.warm_start is not None:
                known = plan.space if schema is None else None
                given = (request.warm_start, known, store, plan.settings.least_budget, plan.settings.objectives)
                source = read_source(*given)
                if source.schema is not None:
                    plan = plan.with_space(source.schema.space())
                    kept["tree"] = to_json(plan.space, source.schema)
                warm_start = fit(source, plan.subspaces, plan.settings.objectives)
            earlier = earlier_study(store, plan.space.describe(), name=request.name, **kept)
            if earlier is not None:
                if check_owner is not None:
                    check_owner(earlier.owner)
                plan = plan.with_settings(settle(request, earlier.settings, earlier.in_force), request.limits)
                if (schema := read_schema(earlier.tree)) is not None:
                    plan = plan.with_space(schema.space())
            study = open_study(
                store,
                plan.space.describe(),
                name=request.name if earlier is None else earlier.name,
                key=request.key,
                seed=request.seed,
                in_force=plan.settings.in_force(),
                given=ValuesRecord(plan.space).of,
                warm_start=() if warm_start is None else warm_start.trials,
                **kept,
            )
            if schema is not None:
                study.warm_start = lessons(plan, study)
            opened.pop_all()
        before = {} if earlier is None else earlier.in_force
        return OpenStudy(
            plan=plan,
            store=store,
            study=study,
            # With "if-exists", an existing study keeps the warm start with which it began.
            warm_start=warm_start if earlier is None else None,
            changes=changes(before, plan.settings.in_force(), study.counted),
        )


@dataclass(frozen=True, kw_only=True)
class OpenStudy:
    """A study that is open: this process holds its lock until `close`."""

    plan: Plan
    store: SqlStore | LateStore
    study: StudyState
    #: trials of earlier studies from which the study learns; None without a warm start in this run
    warm_start: WarmStart | None
    #: lines about settings that differ from the previous run
    changes: Sequence[str]

    def scheduler(
        self,
        executor: Executor,
        limits: Limits | None = None,
        *,
        pruning: Pruning | None = None,
        is_known: bool = False,
    ) -> Scheduler:
        """Return a scheduler for the study. The default `limits` are the plan's; the rest is as in `make_scheduler`."""
        plan = self.plan if limits is None else self.plan.with_settings(self.plan.settings, limits)
        return make_scheduler(plan, self.study, executor, pruning=pruning, is_known=is_known)

    @property
    def space(self) -> Space | None:
        """The space that users have declared; None if their objective asks for its labels."""
        return self.plan.space if self.study.schema is None else None

    def record_settings(self, settings: Mapping[str, Any], in_force: Mapping[str, Any]) -> None:
        """Record settings that were given after the study was opened, and all settings in force. Raises StoreError."""
        before = self.study.record
        record = dataclasses.replace(before, settings={**before.settings, **settings}, in_force=in_force)
        self.store.record_settings(record.key, self.study.fence, record.settings, record.in_force)
        self.study.record = record

    def grown(self) -> OpenStudy:
        """Return the study in the space of the labels for which its trials have asked so far, and record that space.

        The trials get the subspaces of that space. If the store cannot be reached, the study is returned unchanged, and
        the caller should try again later. Raises StoreError.
        """
        study, schema = self.study, self.study.schema
        assert schema is not None
        if not study.commit():
            return self
        plan = self.plan.with_space(schema.space())
        space, tree = plan.space.describe(), to_json(plan.space, schema)
        try:
            moved = {each.number: name for each in study if (name := place(plan, each)) != each.subspace}
            key, now = study.record.key, study.clock.wall()
            self.store.reshape(key, study.fence, now, space=space, tree=tree, moved=moved)
            trials = [*self.store.earlier(key)]
        except StoreOutage as error:
            study.wait_for_store(error)
            return self
        study.warm_start = lessons(plan, study)
        study.reshape(dataclasses.replace(study.record, space=space, tree=tree), trials)
        return dataclasses.replace(self, plan=plan)

    def call(self, on_trial: OnTrial, scheduler: Scheduler, warn: Callable[[str], None]) -> None:
        """Let `scheduler` call `on_trial` after each trial."""
        running = RunningStudy(self.store, self.study.record, self.space)
        running.end = partial(scheduler.stop, "on_trial called study.stop()", "on_trial")
        scheduler.on_trial = TrialCallback(on_trial, running, warn)

    def other_code(self) -> str | None:
        """Return a warning if the study has trials of other versions of its code than this run's, else None.

        If this run's version is not known, there is no warning.
        """
        now = self.study.code
        if isinstance(self.store, LateStore) or self.store.is_in_memory:
            # This needs no warning, because the program that runs the study has itself changed the objective.
            return None
        trials = self.store.tally(self.study.record.key, "code")
        others = ", ".join(f"{count} of version {code}" for code, count in trials.items() if code != now)
        if not now or not others or self.study.best is None:
            # Trials without a loss, such as trials that failed before a fix, do not affect later trials.
            return None
        same = f", beside {trials[now]} of this version" if trials.get(now) else ""
        return (
            f"the objective's code is now version {now}, and this study has trials of other code: {others}{same}; "
            "their failures no longer count, but their losses do, for its best trials, sampler and pruner; if these "
            "are other losses, begin a new study for the new code"
        )

    def close(self) -> None:
        """Record the remaining changes and unlock the study. It is unlocked even if recording fails."""
        try:
            self.study.close()
        finally:
            self.store.close()


def open_store(url: str) -> SqlStore | LateStore:
    """Return the store at a URL; without a file or a server, one that needs no SQLAlchemy until it is read by SQL."""
    if url == LateStore.url:
        return LateStore()
    from shadho_celery.store.sql import SqlStore

    return SqlStore(url)


def place(plan: Plan, trial: Trial) -> str:
    """Return the subspace of a trial. A trial that failed early may lack a choice, and gets the first subspace."""
    fitting = [each.name for each in plan.subspaces if each.contains(trial.params)]
    return next(iter(fitting), plan.subspaces[0].name)


def lessons(plan: Plan, study: StudyState) -> list[Trial]:
    """Return the trials of earlier studies from which a study learns, in the subspaces of the present space."""
    return [replace(each, subspace=place(plan, each)) for each in study.warm_start]


def changes(before: Mapping[str, Any], now: Mapping[str, Any], trials: int) -> list[str]:
    """Return lines for the user if a study continues with another sampler or other budgets.

    `before` and `now` are the settings in force in the previous run and in this one. `trials` is the number of ended
    trials.
    """
    lines = [other_sampler(before.get("sampler", now["sampler"]), now["sampler"], trials)]
    was, is_now = (None if ladder is None else ladder.in_words for ladder in map(ladder_of, (before, now)))
    # `was` is None for a study that began without budgets.
    if trials and was is not None and was != is_now:
        lines += [f"budgets from now on: {is_now or 'none'}; until now: {was}"]
    return [line for line in lines if line is not None]
