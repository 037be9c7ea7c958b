"""hyperopt's way to call: `fmin` and `Trials` by their own signatures, with this package's samplers behind them.

Spaces, results and records are hyperopt's own: its `Domain` calls the objective, its `Trials` keep the documents.
"""

from __future__ import annotations

import inspect
import math
import os
import pickle
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any, Protocol

import hyperopt
import numpy as np
from hyperopt import STATUS_FAIL, STATUS_OK, anneal, base, hp, progress, rand, space_eval, tpe
from hyperopt.exceptions import AllTrialsFailed, InvalidAnnotatedParameter
from hyperopt.fmin import generate_trials_to_calculate
from hyperopt.pyll.base import Apply
from hyperopt.utils import coarse_utcnow

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.files import replacing
from shadho_celery.errors import NoSuccessfulTrial, SpaceError, UsageError
from shadho_celery.program.study import AskedTrial, Study
from shadho_celery.program.words import python_words
from shadho_celery.samplers import MakeSampler, unrepeated
from shadho_celery.samplers.hyperopt import HYPEROPT, Suggest, new_document, suggest_of, suggestion
from shadho_celery.samplers.random import RandomSampler
from shadho_celery.samplers.tpe import TpeSampler
from shadho_celery.space.compile import compile_space
from shadho_celery.space.points import complete
from shadho_celery.space.split import split

#: one of hyperopt's documents of a trial
Document = dict[str, Any]

#: what the package's root has of hyperopt, too
__all__ = ["STATUS_FAIL", "STATUS_OK", "Trials", "anneal", "fmin", "hp", "rand", "space_eval", "tpe"]

_SUGGEST = {tpe.suggest: "tpe", rand.suggest: "random", anneal.suggest: "anneal"}
ALGOS = "tpe.suggest, rand.suggest or anneal.suggest"
#: options of ``partial(tpe.suggest, ...)``, and what they are called in our sampler; None for one that changes no trial
_TPE = {"n_startup_jobs": "startup", "n_EI_candidates": "candidates", "gamma": "gamma", "verbose": None}
_ANNEAL = ("avg_best_idx", "shrink_coef")
#: greatest seed of one proposal, as hyperopt draws it
_MAX_SEED = 2**31 - 1


class Trials(hyperopt.Trials):  # type: ignore[misc]  # hyperopt has no types
    """hyperopt's ``Trials``; its method `fmin` is this package's too."""

    def fmin(  # noqa: PLR0917  # hyperopt's own signature
        self,
        fn: Callable[..., Any],
        space: Any,
        algo: Any = None,
        max_evals: float | None = None,
        timeout: float | None = None,
        loss_threshold: float | None = None,
        max_queue_len: int = 1,
        rstate: np.random.Generator | np.random.RandomState | int | None = None,
        verbose: bool = False,
        pass_expr_memo_ctrl: bool | None = None,
        catch_eval_exceptions: bool = False,
        return_argmin: bool = True,
        show_progressbar: Any = True,
        early_stop_fn: Callable[..., tuple[bool, Iterable[Any]]] | None = None,
        trials_save_file: str = "",
    ) -> Any:
        """Minimise `fn`, as `fmin` does, and keep the trials here; silently, unless `verbose`."""
        return fmin(
            fn,
            space,
            algo,
            max_evals,
            timeout,
            loss_threshold,
            self,
            rstate,
            pass_expr_memo_ctrl=pass_expr_memo_ctrl,
            catch_eval_exceptions=catch_eval_exceptions,
            verbose=verbose,
            return_argmin=return_argmin,
            max_queue_len=max_queue_len,
            show_progressbar=show_progressbar,
            early_stop_fn=early_stop_fn,
            trials_save_file=trials_save_file,
        )


@python_words()
def fmin(  # noqa: PLR0917  # hyperopt's own signature
    fn: Callable[..., Any],
    space: Any,
    algo: Any = None,
    max_evals: float | None = None,
    timeout: float | None = None,
    loss_threshold: float | None = None,
    trials: hyperopt.Trials | None = None,
    rstate: np.random.Generator | np.random.RandomState | int | None = None,
    allow_trials_fmin: bool = True,
    pass_expr_memo_ctrl: bool | None = None,
    catch_eval_exceptions: bool = False,
    verbose: bool = True,
    return_argmin: bool = True,
    points_to_evaluate: list[dict[str, Any]] | None = None,
    max_queue_len: int = 1,
    show_progressbar: Any = True,
    early_stop_fn: Callable[..., tuple[bool, Iterable[Any]]] | None = None,
    trials_save_file: str = "",
) -> Any:
    """Minimise `fn` over `space`, as hyperopt's ``fmin`` does; return the best trial's drawn values by label.

    Arguments and results are hyperopt's. `algo` is tpe.suggest (the default), rand.suggest or anneal.suggest, or a
    ``partial`` of one: the first two name this package's samplers, anneal is hyperopt's own; so are "hyperopt:tpe" and
    "hyperopt:rand". A search is resumed by passing its `trials` again with a larger `max_evals`. An exception of `fn`
    ends the search unless `catch_eval_exceptions`. `allow_trials_fmin` makes no difference: there is one fmin.
    Raises UsageError for an unknown `algo`, SpaceError for a space that cannot be searched, else as hyperopt does.
    """
    base.validate_timeout(timeout)
    base.validate_loss_threshold(loss_threshold)
    propose, options = _read_algo(algo)
    if isinstance(space, str) and space == "annotated":
        fn, space = _annotated(fn)
    if trials is not None and points_to_evaluate is not None:
        raise UsageError("points_to_evaluate go into new trials; leave out one of trials and points_to_evaluate")
    trials = _trials(trials, points_to_evaluate, trials_save_file)
    domain = base.Domain(_with_status(fn), space, pass_expr_memo_ctrl=pass_expr_memo_ctrl)
    bar = show_progressbar if verbose else False
    search = _Search(
        domain,
        trials,
        propose(space, domain, trials, _seed(rstate), options),
        catches=catch_eval_exceptions,
        queue=max_queue_len,
        early_stop=early_stop_fn,
        save_file=trials_save_file,
        show=progress.default_callback if bar is True else bar or progress.no_progress_callback,
    )
    # Scripts write 1e3, too.
    search.run(sys.maxsize if max_evals is None else int(max_evals), timeout, loss_threshold)
    if return_argmin:
        return _argmin(trials)
    return space_eval(space, _argmin(trials)) if len(trials) else None


def _with_status(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the objective; it raises UsageError for a dict without a status, where hyperopt has a bare KeyError."""

    # wraps: hyperopt reads an attribute of the objective.
    @wraps(fn)
    def checked(*args: Any, **named: Any) -> Any:
        result = fn(*args, **named)
        if isinstance(result, Mapping) and "status" not in result:
            several = "; several losses are for minimize(..., objectives=...)" if "losses" in result else ""
            raise UsageError(
                f"the objective returned {short(result, 60)}, which has no status; let it return one number, or "
                f'{{"loss": ..., "status": STATUS_OK}}{several}'
            )
        return result

    return checked


class NoTrials(NoSuccessfulTrial, AllTrialsFailed):  # type: ignore[misc]  # hyperopt has no types
    """No trial was run, so there is no argmin: see max_evals."""


def _argmin(trials: hyperopt.Trials) -> Any:
    """Return the drawn values of the best trial. Raises NoTrials, with the last failure, if none has succeeded."""
    with suppress(AllTrialsFailed):
        if len(trials):
            return trials.argmin
    ended = [each for each in trials._dynamic_trials if each["state"] != base.JOB_STATE_NEW]
    if not ended:
        raise NoTrials
    last = ended[-1]
    kind, message = last["misc"].get("error") or ("", f"the objective returned {short(last['result'], 200)}")
    what = f"{kind}: {one_line(message)}" if kind else message
    raise NoTrials(f"none of {len(ended)} trials has succeeded, so there is no argmin; the last one: {what}")


class _Proposer(Protocol):
    """Proposes params, and learns from results."""

    def ask(self, number: int) -> Mapping[str, Any]:
        """Return the drawn values of the active labels for the trial of this number."""

    def tell(self, document: Document) -> None:
        """Learn from a trial that has ended, proposed or not."""

    def close(self) -> None:
        """End the search."""


class _Sampled:
    """Proposals of this package's samplers, for one subspace after the other."""

    def __init__(self, space: Any, trials: hyperopt.Trials, seed: int, make: MakeSampler) -> None:
        self._study = Study(space, seed=seed, sampler=make)
        #: trials that were proposed and are not told yet, by hyperopt's numbers
        self._asked: dict[int, AskedTrial] = {}
        # A trial that still runs was interrupted, and is never ended.
        lasting = [each for each in trials._dynamic_trials if each["state"] != base.JOB_STATE_RUNNING]
        ended = [each for each in lasting if each["state"] != base.JOB_STATE_NEW]
        waiting = [each for each in lasting if each["state"] == base.JOB_STATE_NEW]
        ended, waiting = [*_within(space, ended, off_grid=True)], [*_within(space, waiting)]
        self._study.add(map(_point, ended), map(_loss, ended))
        self._study.enqueue(map(_point, waiting))
        for document in waiting:
            trial = self._asked[document["tid"]] = self._study.ask()
            _fill(document, trial)

    def ask(self, number: int) -> Mapping[str, Any]:
        trial = self._asked[number] = self._study.ask()
        return trial.params

    def tell(self, document: Document) -> None:
        trial = self._asked.pop(document["tid"], None)
        if trial is not None:
            self._study.tell(trial, _loss(document))

    def close(self) -> None:
        self._study.close()


def _point(document: Document) -> Mapping[str, Any]:
    point: Mapping[str, Any] = base.spec_from_misc(document["misc"])
    return point


def _fill(document: Document, trial: AskedTrial) -> None:
    """Write what a point to evaluate leaves out into its document, as its trial has it."""
    misc = document["misc"]
    for label, value in trial.params.items():
        if not misc["vals"].get(label):
            misc["idxs"][label], misc["vals"][label] = [document["tid"]], [value]


def _loss(document: Document) -> float:
    """Return the loss of a trial that has ended; NaN for a failure."""
    loss = document["result"].get("loss")
    is_ok = document["state"] == base.JOB_STATE_DONE and document["result"].get("status") == STATUS_OK
    return float(loss) if is_ok and loss is not None else math.nan


def _within(space: Any, documents: Iterable[Document], *, off_grid: bool = False) -> Iterator[Document]:
    """Yield the trials of an earlier search, and the known points, that lie in the space.

    hyperopt evaluates the others all the same, and so do we; a sampler cannot learn from them.
    """
    compiled = compile_space(space)
    subspaces, generator = split(compiled), np.random.default_rng(0)
    for document in documents:
        with suppress(SpaceError):
            complete(compiled, subspaces, _point(document), generator, off_grid=off_grid)
            yield document


class _Suggested:
    """Proposals of one of hyperopt's own algorithms, which reads the documents of all trials."""

    def __init__(
        self, suggest: Suggest, domain: base.Domain, trials: hyperopt.Trials, seed: int, options: Mapping[str, Any]
    ) -> None:
        self._suggest, self._domain, self._trials = partial(suggest, **options), domain, trials
        self._generator = np.random.default_rng(seed)

    def ask(self, number: int) -> Mapping[str, Any]:
        seed = int(self._generator.integers(_MAX_SEED))
        return suggestion(self._suggest, number, self._domain, self._trials, seed)

    def tell(self, document: Document) -> None:
        pass

    def close(self) -> None:
        pass


class _Search:
    """One call of fmin."""

    def __init__(
        self,
        domain: base.Domain,
        trials: hyperopt.Trials,
        proposer: _Proposer,
        *,
        catches: bool,
        queue: int,
        early_stop: Callable[..., tuple[bool, Iterable[Any]]] | None,
        save_file: str,
        show: Callable[..., Any],
    ) -> None:
        self._domain, self._trials, self._proposer = domain, trials, proposer
        self._catches, self._queue, self._save_file, self._show = catches, max(1, queue), save_file, show
        self._early_stop = early_stop
        self._stop_state: Iterable[Any] = ()

    def run(self, total: int, timeout: float | None, threshold: float | None) -> None:
        """Evaluate trials until there are `total`, the time is up, a loss is below the threshold, or an early stop."""
        began = time.monotonic()
        left = total - len(self._trials)
        # Known points of hyperopt's are beyond the total: its `Trials` do not count them before they are refreshed.
        self._trials.refresh()
        try:
            with self._show(initial=self._done, total=total) as shown:
                while True:
                    done = self._done
                    is_late = timeout is not None and time.monotonic() - began >= timeout
                    if is_late or (threshold is not None and self._best < threshold):
                        break
                    waiting = [each for each in self._trials._dynamic_trials if each["state"] == base.JOB_STATE_NEW]
                    for _ in range(min(left, self._queue - len(waiting))):
                        waiting.append(self._propose())
                        left -= 1
                    if not waiting:
                        break
                    is_stopped = self._turn(waiting)
                    if self._best < math.inf:
                        shown.postfix = f"best loss: {self._best}"
                    shown.update(self._done - done)
                    if is_stopped:
                        break
        finally:
            self._proposer.close()

    @property
    def _done(self) -> int:
        found: int = self._trials.count_by_state_unsynced(base.JOB_STATE_DONE)
        return found

    @property
    def _best(self) -> float:
        losses = (loss for loss in self._trials.losses() if loss is not None and not math.isnan(loss))
        return float(min(losses, default=math.inf))

    def _propose(self) -> Document:
        """Enter a new trial."""
        trials, domain = self._trials, self._domain
        [number] = trials.new_trial_ids(1)
        params = self._proposer.ask(number)
        trials.insert_trial_docs([new_document(number, params, domain, trials)])
        trials.refresh()
        document: Document = trials._dynamic_trials[-1]
        return document

    def _turn(self, waiting: Iterable[Document]) -> bool:
        """Evaluate the trials that wait; return True if the search stops early."""
        for document in waiting:
            self._evaluate(document)
        self._trials.refresh()
        if self._save_file:
            _save(self._trials, self._save_file)
        if self._early_stop is None:
            return False
        is_stopped, self._stop_state = self._early_stop(self._trials, *self._stop_state)
        return bool(is_stopped)

    def _evaluate(self, document: Document) -> None:
        document["state"] = base.JOB_STATE_RUNNING
        document["book_time"] = document["refresh_time"] = coarse_utcnow()
        control = base.Ctrl(self._trials, current_trial=document)
        try:
            document["result"] = self._domain.evaluate(base.spec_from_misc(document["misc"]), control)
            document["state"] = base.JOB_STATE_DONE
        except Exception as error:
            document["state"] = base.JOB_STATE_ERROR
            document["misc"]["error"] = (str(type(error)), str(error))
            if not self._catches:
                raise
        finally:
            document["refresh_time"] = coarse_utcnow()
            # A trial with an exception is none of the `trials` any more.
            self._trials.refresh()
        self._proposer.tell(document)


_Propose = Callable[[Any, base.Domain, hyperopt.Trials, int, Mapping[str, Any]], _Proposer]


def _read_algo(algo: Any) -> tuple[_Propose, Mapping[str, Any]]:
    """Return what makes the proposer that `algo` names, and its options. Raises UsageError for an unknown one."""
    function: Any = algo
    options: dict[str, Any] = {}
    while isinstance(function, partial):
        if function.args:
            raise UsageError(f"algo: a partial of {_name(function.func)} has keyword arguments only")
        function, options = function.func, {**function.keywords, **options}
    name = "tpe" if function is None else function if isinstance(function, str) else None
    if name is None:
        name = next((known for suggest, known in _SUGGEST.items() if suggest is function), None)
    if name == "anneal" or (name or "").startswith(HYPEROPT):
        _refuse_unknown("anneal.suggest", options, _ANNEAL)
        suggest = suggest_of((name or "").removeprefix(HYPEROPT))
        return lambda space, domain, trials, seed, given: _Suggested(suggest, domain, trials, seed, given), options
    if name == "tpe":
        found = _tpe_options(options)
        make = unrepeated(partial(TpeSampler, **found))
        return lambda space, domain, trials, seed, _: _Sampled(space, trials, seed, make), {}
    if name == "random":
        _refuse_unknown("rand.suggest", options, ())
        return lambda space, domain, trials, seed, _: _Sampled(space, trials, seed, RandomSampler), {}
    raise UsageError(f"algo: there is no {_name(function)} here; give {ALGOS}, or a partial of one")


def _tpe_options(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the options of our TPE for those of hyperopt's. Raises UsageError for one that it has not."""
    _refuse_unknown("tpe.suggest", options, _TPE)
    found = {ours: value for name, value in options.items() if (ours := _TPE[name]) is not None}
    for name in ("n_startup_jobs", "n_EI_candidates"):
        value = options.get(name, 1)
        if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < 1:
            raise UsageError(f"algo: {name} is {short(value, 60)}; give a whole number from 1")
    gamma = options.get("gamma", 1)
    if isinstance(gamma, bool) or not isinstance(gamma, (int, float)) or not 0 < gamma < math.inf:
        raise UsageError(f"algo: gamma is {short(gamma, 60)}; give a number above 0")
    return found


def _refuse_unknown(name: str, options: Mapping[str, Any], known: Iterable[str]) -> None:
    known = [*known]
    if unknown := [option for option in options if option not in known]:
        raise UsageError(f"algo: {name} has no {unknown[0]} here; it takes {', '.join(known) or 'no options'}")


def _name(function: Any) -> str:
    module, name = getattr(function, "__module__", ""), getattr(function, "__qualname__", None)
    return f"{module}.{name}" if name else short(function, 60)


def _annotated(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function of a dict, and the space that the annotations of `fn` give."""
    space = {name: hint for name, hint in inspect.getfullargspec(fn).annotations.items() if name != "return"}
    for name, hint in space.items():
        if not isinstance(hint, Apply):
            raise InvalidAnnotatedParameter(
                f"the annotation of {name!r} is no hp expression; write {name}: hp.uniform({name!r}, 0, 1), or pass "
                "a space"
            )
    return lambda values: fn(**values), space


def _trials(given: Any, points: list[dict[str, Any]] | None, save_file: str) -> hyperopt.Trials:
    """Return the trials to fill: those given, those of the file, the points to evaluate, or none."""
    if given is not None:
        if not isinstance(given, hyperopt.Trials):
            raise UsageError(f"trials is {short(given, 60)}; give Trials(), which is filled, or leave it out")
        if given.asynchronous:
            raise UsageError(
                f"trials of {type(given).__name__} are evaluated by other processes; pass Trials(), or run the "
                "study on workers of this package"
            )
        return given
    if save_file and Path(save_file).exists():
        return _load(Path(save_file))
    if points is None:
        return Trials()
    if not isinstance(points, list):
        raise UsageError(f"points_to_evaluate are a list of dicts, not {short(points, 60)}")
    return generate_trials_to_calculate(points)


def _seed(rstate: Any) -> int:
    """Return a seed drawn from a generator of numpy's, old or new; else the number itself, else hyperopt's variable."""
    if rstate is None:
        fixed = os.environ.get("HYPEROPT_FMIN_SEED", "")
        rstate = np.random.default_rng(int(fixed) if fixed else None)
    if isinstance(rstate, np.random.Generator):
        return int(rstate.integers(_MAX_SEED))
    if isinstance(rstate, np.random.RandomState):
        return int(rstate.randint(_MAX_SEED))
    if isinstance(rstate, (int, np.integer)) and not isinstance(rstate, bool):
        return int(rstate)
    raise UsageError(f"rstate is {short(rstate, 60)}; give numpy.random.default_rng(SEED), or a whole number")


def _load(file: Path) -> hyperopt.Trials:
    """Return the trials of an earlier search. Raises UsageError for a file that does not have them."""
    try:
        loaded = _pickler().loads(file.read_bytes())
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"trials_save_file {file} cannot be read ({short(cause, 200)}); remove it to begin anew"
        ) from None
    if not isinstance(loaded, hyperopt.Trials):
        raise UsageError(f"trials_save_file {file} has {short(loaded, 60)}, not Trials; name another file")
    return loaded


def _save(trials: hyperopt.Trials, save_file: str) -> None:
    """Write the trials to a file; an earlier one stays whole until then. Raises UsageError."""
    content = _pickler().dumps(trials)
    try:
        with replacing(Path(save_file)) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(
            f"trials_save_file {save_file} cannot be written: {error.strerror}; what it had before is whole"
        ) from None


def _pickler() -> Any:
    """Return cloudpickle where it is installed, as hyperopt uses it: it takes lambdas, too."""
    try:
        import cloudpickle
    except ImportError:
        return pickle
    return cloudpickle
