"""Optuna's `Study` over a study of this package."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import wraps
from typing import Any
from weakref import WeakValueDictionary

from msgspec.structs import replace

from shadho_celery.core.checks import short
from shadho_celery.core.failures import TRACEBACK, headline
from shadho_celery.core.hardware import usable_cores
from shadho_celery.core.settings import refuse_unknown
from shadho_celery.core.trial import COUNTED, Outcome
from shadho_celery.core.trial import TrialState as State
from shadho_celery.errors import StudyLocked, StudyNotFound, UsageError
from shadho_celery.objective.result import read_metrics
from shadho_celery.objective.suggest import Trial, is_pruning, read_losses
from shadho_celery.optuna.trial import FrozenTrial, TrialState, frozen
from shadho_celery.program import recorded
from shadho_celery.program import study as program
from shadho_celery.program.optuna_study import steps_of
from shadho_celery.results.frame import load_pandas
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.schema import FACTS, Schema, law_of
from shadho_celery.space.stored import read_schema
from shadho_celery.store.engine import is_in_memory

#: URL of a store in memory
IN_MEMORY = "sqlite://"
#: time limit in seconds for a search that should not end by itself
_ENDLESS = 1e9
#: Optuna's columns of a table of trials, in order
_DATES = ("datetime_start", "datetime_complete", "duration")
_COLUMNS = ("number", "value", *_DATES, "params", "user_attrs", "system_attrs", "state")

#: studies that this process has open, by store and name, because only one object at a time can change a study
_opened: WeakValueDictionary[tuple[str, str], program.Study] = WeakValueDictionary()


def create_study(
    *,
    storage: str = IN_MEMORY,
    sampler: Mapping[str, Any] | None = None,
    pruner: Any = None,
    study_name: str | None = None,
    direction: str | None = None,
    load_if_exists: bool = False,
    directions: Sequence[str] | None = None,
) -> Study:
    """Begin a study. `storage` is the URL of a store, by default in memory.

    Raises StudyExists if the store has a study of this name, unless `load_if_exists`.
    """
    if direction is not None and directions is not None:
        raise UsageError("give direction or directions, not both")
    ways = directions or [direction or "minimize"]
    losses: dict[str, Any] = {"objectives": {f"values_{place}": way for place, way in enumerate(ways)}}
    if len(ways) == 1:
        # Optuna's default for one loss is the pruner median.
        losses, pruner = {"direction": ways[0]}, pruner or "median"
    settings = {**losses, **_chosen(sampler, pruner)}
    resume = "if-exists" if load_if_exists and study_name is not None else False
    return Study(_opened_study(storage or IN_MEMORY, study_name, resume=resume, **settings), storage or IN_MEMORY, {})


def load_study(*, study_name: str, storage: str, sampler: Mapping[str, Any] | None = None, pruner: Any = None) -> Study:
    """Return a recorded study. It is locked only at its first change, so a study that runs can be read."""
    found = recorded.load_study(storage, study_name)
    if found.name != study_name:
        raise StudyNotFound(f"there is no study named {study_name!r}; did you mean {found.name!r}?")
    return Study(found, storage, {**_chosen(sampler, pruner), "seed": None})


class MaxTrialsCallback:
    """Callback of `Study.optimize` that stops it once the study has `n_trials` trials in one of these states."""

    def __init__(self, n_trials: int, states: Iterable[TrialState] | None = (TrialState.COMPLETE,)) -> None:
        self._most, self._states = n_trials, states

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        """Stop the study if it has enough trials."""
        if len(study.get_trials(states=self._states)) >= self._most:
            study.stop()


class Study:
    """A study in the shape of Optuna's."""

    def __init__(self, found: StudyResults, url: str, chosen: Mapping[str, Any]) -> None:
        """`found` is an open study, or a recorded study that is opened at its first change. `chosen` are the settings
        with which it is opened, such as sampler and pruner.
        """
        self._found, self._url, self._chosen = found, url, chosen
        #: by number: trials that `ask` has returned
        self._asked: dict[int, Trial] = {}
        #: True once `stop` was called; None while `optimize` is not running
        self._is_stopping: bool | None = None

    @property
    def study_name(self) -> str:
        return self._found.name

    def optimize(  # noqa: PLR0917  # Optuna's own signature
        self,
        func: Callable[[Trial], Any],
        n_trials: int | None = None,
        timeout: float | None = None,
        n_jobs: int = 1,
        catch: Iterable[type[Exception]] | type[Exception] = (),
        callbacks: Iterable[Callable[[Any, FrozenTrial], object]] | None = None,
        gc_after_trial: bool = False,
        show_progress_bar: bool = False,
    ) -> None:
        """Run `n_trials` more trials, at most for `timeout` seconds. Without both, run until `stop` or Ctrl-C.

        An exception that `catch` does not name fails its trial and ends the search, as in Optuna. `n_jobs` is the
        number of processes, or -1 for one on each core; with several, the study needs a `storage`, which the processes
        open themselves.
        """
        caught = (catch,) if isinstance(catch, type) else tuple(catch)
        raised = list[Exception]()

        @wraps(func)
        def called(trial: Trial, *context: Any) -> Any:
            trial.study = self
            try:
                return func(trial, *context)
            except Exception as error:
                if not (isinstance(error, caught) or is_pruning(error)):
                    raised.append(error)
                raise

        def on_trial(running: Any, trial: TrialResult) -> None:
            if n_jobs != 1 and trial.state == State.FAILED and not _is_caught(trial.error, caught):
                raised.append(RuntimeError(f"trial {trial.number} has failed: {trial.error}"))
            try:
                for callback in callbacks or ():
                    callback(self, *self._frozen([trial]))
            except Exception as error:
                raised.append(error)
            if raised or self._is_stopping:
                self._is_stopping = True
                running.stop()

        if n_jobs != 1 and is_in_memory(self._url):
            raise UsageError("n_jobs needs a storage that other processes can open, such as sqlite:///shadho.db")
        study = self._open()
        total = None if n_trials is None else study.count(*COUNTED) + n_trials
        limits: dict[str, Any] = {"trials": total, "seconds": _ENDLESS if total is timeout is None else timeout}
        limits |= {"max_failures": 0, "progress": show_progress_bar, "on_trial": on_trial}
        self._is_stopping = False
        try:
            if n_jobs == 1:
                study.run(called, **limits)
            else:
                study.close()
                limits |= {"workers": usable_cores().cores if n_jobs < 0 else n_jobs, "resume": True}
                program.minimize(func, store=self._url, study=study.name, **limits)
                # Read the study again, because its labels are known only now.
                self._found = recorded.load_study(self._url, study.name)
        finally:
            self._is_stopping = None
        if raised:
            raise raised[0]

    def stop(self) -> None:
        """End `optimize` after this trial. Only its objective or a callback may call this."""
        if self._is_stopping is None:
            raise RuntimeError("stop is for an objective or a callback of optimize")
        self._is_stopping = True

    def ask(self, fixed_distributions: Mapping[str, Any] | None = None) -> Trial:
        """Return the next trial. The labels of `fixed_distributions` already have values in it."""
        trial: Trial = self._open().ask()
        trial.study, self._asked[trial.number] = self, trial
        for label, each in (fixed_distributions or {}).items():
            trial.suggest(label, law_of(label, each))
        return trial

    def tell(
        self,
        trial: Trial | int,
        values: float | Sequence[float] | None = None,
        state: TrialState | None = None,
    ) -> FrozenTrial:
        """Record the result of a trial that `ask` has returned: its values, or the state PRUNED or FAIL."""
        if (asked := self._asked.get(trial) if isinstance(trial, int) else trial) is None:
            raise UsageError(f"trial {trial} was not asked for here, or has its result already")
        told = self._open().tell(asked, _told(state or TrialState.COMPLETE, values))
        self._asked.pop(told.number, None)
        return self._frozen([told])[0]

    @refuse_unknown
    def enqueue_trial(
        self, params: Mapping[str, Any], user_attrs: Mapping[str, Any] | None = None, skip_if_exists: bool = False
    ) -> None:
        """Let the next trial have the values `params`, and record `user_attrs` with it."""
        if not (skip_if_exists and any(params.items() <= each.params.items() for each in self.trials)):
            self._open().enqueue([{**params, FACTS: user_attrs} if user_attrs else params])

    def add_trial(self, trial: Any) -> None:
        """Record a trial that was evaluated elsewhere, with the laws of its labels. Optuna's own trials work too."""
        if not trial.state.is_finished():
            raise UsageError(f"add_trial takes a trial that has ended, and this one is {trial.state.name}; enqueue it")
        outcome, noted = _told(trial.state, trial.values), read_metrics(trial.user_attrs)
        outcome = read_losses(outcome, self._found.objectives)
        outcome = replace(outcome, metrics=noted.metrics, warning=noted.warning)
        reports = trial.intermediate_values
        if trial.state == TrialState.PRUNED and trial.values and not reports:
            # Here, the loss of a pruned trial is that of its last report.
            reports = {0: trial.values[0]}
        laws = {label: law_of(label, each) for label, each in trial.distributions.items()}
        self._open().add([trial.params], [outcome], laws=laws, reports=reports)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers."""
        return self.get_trials()

    def get_trials(self, deepcopy: bool = True, states: Iterable[TrialState] | None = None) -> list[FrozenTrial]:
        """Return the trials in one of these states, by default all."""
        wanted = {*TrialState} if states is None else {*states}
        return [trial for trial in self._frozen(self._found.trials) if trial.state in wanted]

    @property
    def best_trial(self) -> FrozenTrial:
        """The best trial. Raises NoSuccessfulTrial if no trial has succeeded, and RuntimeError for several losses."""
        if self._has_several:
            raise RuntimeError("a study of several directions has best_trials")
        return self._frozen([self._found.best])[0]

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The trials on the Pareto front."""
        return self._frozen(self._found.front) if self._has_several else [self.best_trial]

    @property
    def best_params(self) -> Mapping[str, Any]:
        return self.best_trial.params

    @property
    def best_value(self) -> float | None:
        return self.best_trial.value

    @refuse_unknown
    def trials_dataframe(self, attrs: Sequence[str] = _COLUMNS) -> Any:
        """Return the trials as a table of pandas, with Optuna's columns."""
        pd, trials = load_pandas(), self.trials
        groups = [pd.DataFrame([self._cells(trial, attr) for trial in trials]) for attr in attrs]
        return pd.concat([group.sort_index(axis=1) for group in groups], axis=1)

    def _cells(self, trial: FrozenTrial, attr: str) -> dict[str, Any]:
        """Return a trial's cells in one of Optuna's groups of columns, by column."""
        if attr == "value" and self._has_several:
            values = dict(enumerate(trial.values or ()))
            return {f"values_{place}": values.get(place) for place in range(len(self._found.objectives))}
        value = getattr(trial, attr)
        if isinstance(value, Mapping):
            return {f"{attr}_{name}": each for name, each in value.items()}
        return {attr: value.name if attr == "state" else value}

    @property
    def _has_several(self) -> bool:
        return len(self._found.objectives) > 1

    def _open(self) -> program.Study:
        """Return the open study. Raises StudyLocked if another process runs it."""
        if not (isinstance(self._found, program.Study) and self._found.is_open):
            self._found = _opened_study(self._url, self._found.name, resume=True, **self._chosen)
        return self._found

    def _frozen(self, trials: Iterable[TrialResult]) -> list[FrozenTrial]:
        """Return recorded trials in the shape of Optuna's."""
        trials, objectives = [*trials], self._found.objectives
        schema = read_schema(self._found.tree) or Schema()
        reports = self._found.reports([each.number for each in trials])
        steps = steps_of(reports, next(iter(objectives.values()), "minimize"))
        return [frozen(each, schema, objectives, steps[each.number]) for each in trials]


def _told(state: Any, values: Any) -> Any:
    """Return the result that an objective would return for these values and this state of Optuna."""
    if state.name == "PRUNED":
        return Outcome(state=State.PRUNED)
    failed = Outcome(state=State.FAILED, error="it was told as failed, or without values")
    return failed if state.name == "FAIL" or values is None else values


def _is_caught(error: str | None, caught: tuple[type[Exception], ...]) -> bool:
    """Return whether the error of a trial in another process is not an exception, or is one of the `caught` types.

    The types are compared by name, because only the text of the error is known here.
    """
    if not error or not (TRACEBACK in error or error.startswith("...")):
        return True
    kinds = [*caught]
    for kind in kinds:
        kinds += kind.__subclasses__()
    # A traceback leaves out the modules builtins and __main__.
    name, known = headline(error).partition(":")[0], {f"{kind.__module__}.{kind.__qualname__}" for kind in kinds}
    return Exception in caught or not known.isdisjoint({name, f"builtins.{name}", f"__main__.{name}"})


def _opened_study(url: str, name: str | None, **settings: Any) -> program.Study:
    """Open a study. If another object of this process has it open, close that object first.

    Raises StudyLocked if another process has the study open.
    """
    if name is not None and (other := _opened.pop((url, name), None)) is not None:
        other.close()
    try:
        study = program.Study(store=url, study=name, **settings)
    except StudyLocked as error:
        raise StudyLocked(
            f"{error}; one process runs a study: to take part, let it use a fleet (minimize with broker and redis), "
            "and be a worker: shadho-celery worker -Q cpu --import MODULE"
        ) from None
    if not is_in_memory(url):
        _opened[url, study.name] = study
    return study


def _chosen(sampler: Any, pruner: Any) -> dict[str, Any]:
    """Return the settings of a sampler and a pruner."""
    if not isinstance(sampler or {}, Mapping):
        raise UsageError(f"{short(sampler, 60)} is no sampler of shadho_celery.optuna.samplers; choose one of these")
    return {**(sampler or {}), "pruner": pruner}
