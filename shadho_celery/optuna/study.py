"""Optuna's `Study` over a study of this package."""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from enum import IntEnum
from typing import Any
from weakref import WeakValueDictionary

from shadho_celery.core.checks import short
from shadho_celery.core.failures import headline
from shadho_celery.core.hardware import usable_cores
from shadho_celery.core.trial import COUNTED, Outcome, Params, turned_first
from shadho_celery.core.trial import TrialState as State
from shadho_celery.errors import StoreError, StudyLocked, StudyNotFound, UsageError
from shadho_celery.objective.context import LocalContext
from shadho_celery.objective.suggest import Trial, metric_name
from shadho_celery.optuna.distributions import law_of
from shadho_celery.optuna.samplers import Sampler
from shadho_celery.optuna.trial import FrozenTrial, TrialState, frozen
from shadho_celery.program import recorded
from shadho_celery.program import study as program
from shadho_celery.results.study import StudyResults
from shadho_celery.results.trial import TrialResult
from shadho_celery.space.schema import suggested
from shadho_celery.space.stored import read_schema

#: URL of a store in memory
IN_MEMORY = "sqlite://"
#: seconds of a search without an end
_ENDLESS = 1e9
#: Optuna's columns of a table of trials, in order
_DATES = ("datetime_start", "datetime_complete", "duration")
_COLUMNS = ("number", "value", *_DATES, "params", "user_attrs", "system_attrs", "state")

#: studies that this process has open, by store and key, because only one object at a time can change a study
_opened: WeakValueDictionary[tuple[str, str], _OwnStudy] = WeakValueDictionary()


def create_study(
    *,
    storage: str | None = None,
    sampler: Sampler | None = None,
    pruner: Any = None,
    study_name: str | None = None,
    direction: str | None = None,
    load_if_exists: bool = False,
    directions: Sequence[str] | None = None,
) -> Study:
    """Begin a study. `storage` is the URL of a store, by default in memory.

    Raises StudyExists if there is one of this name, unless `load_if_exists`.
    """
    if direction is not None and directions is not None:
        raise UsageError("give direction or directions, not both")
    ways = [_way(each) for each in ([direction or "minimize"] if directions is None else directions)]
    url, chosen = _url(storage), _chosen(sampler, pruner, is_single=len(ways) == 1)
    if load_if_exists and study_name is not None:
        # Without a store there is no study yet. A store that cannot be used is refused below.
        with suppress(StudyNotFound, StoreError):
            return load_study(study_name=study_name, storage=url, sampler=sampler, pruner=pruner)
    losses: dict[str, Any] = {"objectives": {f"values_{place}": way for place, way in enumerate(ways)}}
    losses = losses if len(ways) > 1 else {"direction": ways[0]} if ways == ["maximize"] else {}
    seed = None if sampler is None else sampler.seed
    study = _OwnStudy(store=url, study=study_name, seed=seed, **losses, **chosen)
    _opened[url, study.key] = study
    return Study(study, url, has_default_pruner=pruner is None)


def load_study(*, study_name: str | None, storage: str, sampler: Sampler | None = None, pruner: Any = None) -> Study:
    """Return a recorded study. Only its first change takes its lock, so a study that runs can be read."""
    url = _url(storage)
    if study_name is None:
        names = get_all_study_names(url)
        if len(names) != 1:
            raise UsageError(f"there are {len(names)} studies in {storage}; give study_name")
        [study_name] = names
    found = recorded.load_study(url, study_name)
    if found.name != study_name:
        raise StudyNotFound(f"there is no study named {study_name!r} in {found.store}")
    return Study(found, url, _chosen(sampler, pruner, is_single=None), has_default_pruner=pruner is None)


def delete_study(*, study_name: str, storage: str) -> None:
    """Delete a study that does not run."""
    recorded.load_study(_url(storage), study_name).delete()


def get_all_study_names(storage: str) -> list[str]:
    """Return the names of the studies of a store."""
    return sorted(each.name for each in recorded.list_studies(_url(storage)))


class StudyDirection(IntEnum):
    """Optuna's directions of a loss."""

    NOT_SET = 0
    MINIMIZE = 1
    MAXIMIZE = 2


class MaxTrialsCallback:
    """Callback of `Study.optimize` that stops it once the study has `n_trials` trials in one of these states."""

    def __init__(self, n_trials: int, states: Iterable[TrialState] | None = (TrialState.COMPLETE,)) -> None:
        self._most, self._states = n_trials, states

    def __call__(self, study: Study, trial: FrozenTrial) -> None:
        """Stop the study if it has enough trials."""
        if len(study.get_trials(states=self._states)) >= self._most:
            study.stop()


class _OwnStudy(program.Study):
    """The study behind `Study`."""

    #: the `Study` that its trials know
    face: Study | None = None
    #: exception of the latest trial that has failed
    error: Exception | None = None

    def _trial_of(self, context: LocalContext, proposed: Params) -> Trial:
        trial = super()._trial_of(context, proposed)
        trial.study = self.face
        return trial

    def _note_error(self, error: Exception) -> None:
        self.error = error


class Study:
    """A study in the shape of Optuna's."""

    def __init__(
        self, found: StudyResults, url: str, chosen: Mapping[str, Any] | None = None, *, has_default_pruner: bool
    ) -> None:
        """`found` is open, or recorded and opened at the first change, with the `chosen` sampler and pruner."""
        self._has_default_pruner = has_default_pruner
        self._found, self._url, self._chosen = found, url, chosen or {}
        #: facts that `set_user_attr` has noted; they are not recorded
        self.user_attrs: dict[str, Any] = {}
        self._asked: dict[int, Trial] = {}
        self._is_running = self._is_stopping = False
        #: exception that ends `optimize`
        self._raised: BaseException | None = None

    @property
    def study_name(self) -> str:
        return self._found.name

    @property
    def directions(self) -> list[StudyDirection]:
        """The direction of each loss."""
        return [StudyDirection[way.upper()] for way in [*self._found.objectives.values()] or ["minimize"]]

    @property
    def direction(self) -> StudyDirection:
        """The direction of the only loss. Raises RuntimeError if there are several."""
        if len(self.directions) > 1:
            raise RuntimeError("this study has several directions; read directions")
        return self.directions[0]

    def set_user_attr(self, key: str, value: Any) -> None:
        """Note a fact of the study in this process."""
        self.user_attrs[key] = value

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
        number of processes, or -1 for one on each core; with several, the study needs a `storage`.
        """
        caught = (catch,) if isinstance(catch, type) else tuple(catch)
        told, names = [*(callbacks or ())], {each.__name__ for each in caught}

        def on_trial(running: Any, trial: TrialResult) -> None:
            if study.error is not None and not isinstance(study.error, caught):
                self._raised = study.error
            elif n_jobs != 1 and trial.state == State.FAILED and headline(trial.error).partition(":")[0] not in names:
                self._raised = RuntimeError(f"trial {trial.number} has failed: {trial.error}")
            try:
                for callback in told:
                    callback(self, self._frozen(trial))
            except Exception as error:
                self._raised = error
            if self._raised is not None or self._is_stopping:
                running.stop()

        study = self._open()
        study.face, study.error = self, None
        total = None if n_trials is None else study.count(*COUNTED) + n_trials
        limits: dict[str, Any] = {"trials": total, "seconds": _ENDLESS if total is timeout is None else timeout}
        limits |= {"max_failures": 0, "progress": show_progress_bar, "on_trial": on_trial}
        self._is_running, self._is_stopping, self._raised = True, False, None
        try:
            with warnings.catch_warnings():
                if self._has_default_pruner:
                    # The user has not asked for a pruner.
                    warnings.filterwarnings("ignore", "no trial has reported a loss")
                if n_jobs == 1:
                    study.run(func, **limits)
                else:
                    self._run_on_workers(study, func, n_jobs, limits)
        finally:
            self._is_running = False
        if self._raised is not None:
            raise self._raised

    def _run_on_workers(
        self, study: program.Study, func: Callable[[Trial], Any], n_jobs: int, limits: Mapping[str, Any]
    ) -> None:
        """Run the objective in several processes of this machine, which open the study themselves."""
        if self._url == IN_MEMORY:
            raise UsageError("n_jobs needs a storage that other processes can open, such as sqlite:///shadho.db")
        if study.enqueued:
            # Only this process has these points.
            study.run(func, **{**limits, "trials": study.count(*COUNTED) + study.enqueued})
        study.close()
        self._found = recorded.load_study(self._url, study.name)
        workers = usable_cores().count if n_jobs < 0 else n_jobs
        program.minimize(func, workers=workers, store=self._url, study=study.name, resume=True, **limits)

    def stop(self) -> None:
        """End `optimize` after this trial. To be called by its objective or a callback."""
        if not self._is_running:
            raise RuntimeError("stop is for an objective or a callback of optimize")
        self._is_stopping = True

    def ask(self, fixed_distributions: Mapping[str, Any] | None = None) -> Trial:
        """Return the next trial, which has asked for the labels of `fixed_distributions` already."""
        study = self._open()
        study.face = self
        trial: Trial = study.ask()
        self._asked[trial.number] = trial
        for label, each in (fixed_distributions or {}).items():
            trial.suggest(label, law_of(each))
        return trial

    def tell(
        self,
        trial: Trial | int,
        values: float | Sequence[float] | None = None,
        state: TrialState | None = None,
        skip_if_finished: bool = False,
    ) -> FrozenTrial:
        """Record the result of a trial that `ask` has returned: its values, or the state PRUNED or FAIL."""
        study = self._open()
        number = trial if isinstance(trial, int) else trial.number
        if (asked := self._asked.pop(number, None)) is None:
            if skip_if_finished or number not in {each.number for each in self.trials}:
                return self._frozen(study.trial(number))
            raise UsageError(f"trial {number} was not asked for here, or has its result already")
        if state == TrialState.PRUNED:
            return self._frozen(study.tell(asked, Outcome(state=State.PRUNED)))
        if state == TrialState.FAIL or values is None:
            return self._frozen(study.tell(asked, error="it was told as failed, or without values"))
        return self._frozen(study.tell(asked, values))

    def enqueue_trial(
        self, params: Mapping[str, Any], user_attrs: Mapping[str, Any] | None = None, skip_if_exists: bool = False
    ) -> None:
        """Let the next trial of this process have these values."""
        if user_attrs:
            raise UsageError("a point has no user_attrs here; set them in the objective")
        if skip_if_exists and any(params.items() <= each.params.items() for each in self.trials):
            return
        self._open().enqueue([params])

    def add_trial(self, trial: Any) -> None:
        """Record a trial that was evaluated elsewhere, with the laws of its labels. It may be one of Optuna itself."""
        asked = suggested({label: law_of(each) for label, each in trial.distributions.items()}, trial.params)
        attrs = {metric_name(key): value for key, value in trial.user_attrs.items()}
        self._open().adopt(asked, self._outcome(trial, attrs))

    def add_trials(self, trials: Iterable[Any]) -> None:
        """Record trials as `add_trial` does."""
        for trial in trials:
            self.add_trial(trial)

    @property
    def trials(self) -> list[FrozenTrial]:
        """All trials, in the order of their numbers."""
        return self.get_trials()

    def get_trials(self, deepcopy: bool = True, states: Iterable[TrialState] | None = None) -> list[FrozenTrial]:
        """Return the trials in one of these states, by default all."""
        reports = defaultdict(list)
        for report in self._found.reports():
            reports[report.number].append(report)
        found = [self._frozen(trial, reports[trial.number]) for trial in self._found.trials]
        wanted = None if states is None else {*states}
        return [trial for trial in found if wanted is None or trial.state in wanted]

    @property
    def best_trial(self) -> FrozenTrial:
        """The best trial. Raises NoSuccessfulTrial without one, and RuntimeError for several losses."""
        if len(self.directions) > 1:
            raise RuntimeError("a study of several directions has best_trials")
        return self._frozen(self._found.best)

    @property
    def best_trials(self) -> list[FrozenTrial]:
        """The trials on the Pareto front."""
        return [*map(self._frozen, self._found.front)] if len(self.directions) > 1 else [self.best_trial]

    @property
    def best_params(self) -> dict[str, Any]:
        return dict(self.best_trial.params)

    @property
    def best_value(self) -> float:
        value = self.best_trial.value
        assert value is not None
        return value

    def trials_dataframe(self, attrs: Sequence[str] = _COLUMNS, multi_index: bool = False) -> Any:
        """Return the trials as a table of pandas, with Optuna's columns."""
        try:
            import pandas as pd
        except ModuleNotFoundError:
            raise UsageError('a table needs pandas; in the checkout: pip install -e ".[export]"') from None
        if multi_index:
            raise UsageError("there is no multi_index here; the columns have names such as params_x")
        rows, names = [], {attr: set[str]() for attr in attrs}
        for trial in self.trials:
            row: dict[str, Any] = {}
            for attr in attrs:
                cells = _cells(trial, attr, len(self.directions))
                names[attr].update(cells)
                row |= cells
            rows.append(row)
        return pd.DataFrame(rows, columns=[name for attr in attrs for name in sorted(names[attr])])

    def _open(self) -> _OwnStudy:
        """Return the open study. Raises StudyLocked if another process runs it."""
        if not (isinstance(self._found, _OwnStudy) and self._found.is_open):
            name, where = self._found.name, (self._url, self._found.key)
            if (other := _opened.pop(where, None)) is not None:
                other.close()
            try:
                self._found = _OwnStudy(store=self._url, study=name, resume=True, **self._chosen)
                _opened[where] = self._found
            except StudyLocked:
                raise StudyLocked(
                    f"study {name!r} is run by {self._found.running_on}, and one process runs a study; to take part, "
                    "let it use a fleet (minimize with broker and redis), and be a worker: shadho-celery worker -Q cpu "
                    "--import MODULE"
                ) from None
        return self._found

    def _frozen(self, trial: TrialResult, reports: Any = None) -> FrozenTrial:
        found = self._found.reports([trial.number]) if reports is None else reports
        return frozen(trial, read_schema(self._found.tree), self._found.objectives, found)

    def _outcome(self, trial: Any, metrics: Mapping[str, Any]) -> Outcome:
        """Return the outcome of a trial that was evaluated elsewhere, which may be one of Optuna itself."""
        state = State(trial.state.name.replace("FAIL", "FAILED"))
        objectives = self._found.objectives
        if state is State.FAILED or trial.values is None:
            return Outcome(state=State.FAILED, error="it has failed elsewhere")
        if len(trial.values) != len(self.directions):
            raise UsageError(f"a trial of this study has {len(self.directions)} values, not {len(trial.values)}")
        losses = {
            name: turned_first(value, {name: way})
            for (name, way), value in zip(objectives.items(), trial.values, strict=False)
        }
        first = next(iter(losses.values()), float(trial.values[0]))
        return Outcome(state=state, loss=first, losses=losses, metrics=metrics)


def _cells(trial: FrozenTrial, attr: str, losses: int) -> dict[str, Any]:
    """Return the cells of one of Optuna's groups of columns by the names of the columns."""
    if attr == "value" and losses > 1:
        return {f"values_{place}": value for place, value in enumerate(trial.values or [None] * losses)}
    value = getattr(trial, attr)
    if isinstance(value, Mapping):
        return {f"{attr}_{name}": each for name, each in value.items()}
    return {attr: value.name if attr == "state" else value}


def _way(direction: Any) -> str:
    """Return a direction, which may be a member of Optuna's enumeration, as a text."""
    name = str(getattr(direction, "name", direction)).lower()
    if name not in {"minimize", "maximize"}:
        raise UsageError(f"there is no direction {short(direction, 60)}; choose minimize or maximize")
    return name


def _url(storage: Any) -> str:
    if storage is not None and not isinstance(storage, str):
        raise UsageError(f"storage is the URL of a store, such as sqlite:///shadho.db, not {short(storage, 60)}")
    return storage or IN_MEMORY


def _chosen(sampler: Any, pruner: Any, *, is_single: bool | None) -> dict[str, Any]:
    """Return the settings of a sampler and a pruner. `is_single` is None for a study that keeps its own."""
    if sampler is not None and not isinstance(sampler, Sampler):
        raise UsageError(f"{short(sampler, 60)} is no sampler of shadho_celery.optuna.samplers; choose one of these")
    # Optuna's default, for one loss.
    pruner = "median" if pruner is None and is_single else pruner
    return {name: each for name, each in (("sampler", sampler and sampler.name), ("pruner", pruner)) if each}
