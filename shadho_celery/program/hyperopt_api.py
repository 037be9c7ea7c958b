"""hyperopt's interface: samplers of this package as algorithms for its ``fmin``, and an `fmin` that wraps it.

Spaces, loop, results and records are hyperopt's own: its `Domain` calls the objective, and its `Trials` contain the
records (documents) of the trials.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from functools import partial, wraps
from pathlib import Path
from typing import Any
from weakref import WeakKeyDictionary

import hyperopt
import numpy as np
from hyperopt import STATUS_OK, Trials, base
from hyperopt.exceptions import AllTrialsFailed, InvalidAnnotatedParameter
from hyperopt.fmin import generate_trials_to_calculate, pickler
from hyperopt.pyll.base import Apply

from shadho_celery.core.checks import one_line, short
from shadho_celery.core.files import replacing
from shadho_celery.core.trial import Params
from shadho_celery.errors import NoSuccessfulTrial, SpaceError, UsageError
from shadho_celery.program.interrupts import warn
from shadho_celery.program.study import AskedTrial, Study
from shadho_celery.space.compile import compile_space
from shadho_celery.space.points import complete
from shadho_celery.space.split import split

#: hyperopt's record of a trial
Document = dict[str, Any]
#: function that hyperopt calls after each pass of its loop. It gets the trials, and the arguments that its last call
#: returned. It returns whether the search should end, and arguments for its next call
EarlyStop = Callable[..., tuple[bool, Iterable[Any]]]

#: maximum of a seed that is drawn from numpy's legacy generator (RandomState)
_MAX_SEED = 2**31 - 1


class Algorithm:
    """A sampler of this package as an algorithm for hyperopt's fmin: ``fmin(..., algo=auto.suggest)``."""

    def __init__(self, sampler: str) -> None:
        self._sampler = sampler
        #: Domain object that hyperopt creates for a call of fmin -> the search of this call
        self._searches: WeakKeyDictionary[base.Domain, _Search] = WeakKeyDictionary()

    def suggest(
        self, new_ids: Sequence[int], domain: base.Domain, trials: hyperopt.Trials, seed: int, **options: Any
    ) -> list[Document]:
        """Return the document of a new trial for each of `new_ids`, like hyperopt's own algorithms.

        In a finite space, points may be repeated. Only the first `seed` of a search has an effect. `options` for
        hyperopt's algorithms have no effect, and cause a warning. Raises SpaceError for a space that cannot be
        searched.
        """
        if domain not in self._searches:
            if options:
                warn(f"algo: options of hyperopt's algorithms have no effect here: {', '.join(options)}")
            self._searches[domain] = _Search(Study(domain.expr, seed=int(seed), sampler=self._sampler), domain.expr)
        return self._searches[domain].propose(new_ids, domain, trials)


# The sampler `grid` is left out: a grid ends, but an algorithm cannot end hyperopt's search.
auto, tpe, gp, cma, qmc, rand = map(Algorithm, ("auto", "tpe", "gp", "cma", "qmc", "random"))


class _Search:
    """Proposes trials for one call of hyperopt's fmin, with a study that learns from hyperopt's documents."""

    def __init__(self, study: Study, space: Any) -> None:
        self._study, self._space = study, space
        #: hyperopt's trial id -> proposed trial that has not ended
        self._asked: dict[int, AskedTrial] = {}
        self._told: set[int] = set()

    def propose(self, new_ids: Iterable[int], domain: base.Domain, trials: hyperopt.Trials) -> list[Document]:
        # Documents of interrupted trials are left out. They stay RUNNING, but their trials never end.
        open_states = {base.JOB_STATE_NEW, base.JOB_STATE_RUNNING}
        known = [each for each in trials._dynamic_trials if each["tid"] not in self._told]
        self._learn([each for each in known if each["state"] not in open_states])
        documents = []
        for number in new_ids:
            trial = self._asked[number] = self._study.ask()
            documents.append(_new_document(number, trial.params, domain, trials))
        return documents

    def _learn(self, ended: Sequence[Document]) -> None:
        """Learn from trials that have ended, including trials of an earlier search, and known points."""
        self._told.update(each["tid"] for each in ended)
        if others := [each for each in ended if each["tid"] not in self._asked]:
            known = [(params, _loss(document)) for document, params in _within(self._space, others)]
            self._study.add((params for params, _ in known), (loss for _, loss in known))
        for document in ended:
            if (trial := self._asked.pop(document["tid"], None)) is not None:
                self._study.tell(trial, _loss(document))


def _loss(document: Document) -> float:
    """Return the loss of a trial that has ended, or NaN if it failed."""
    loss = document["result"].get("loss")
    is_ok = document["state"] == base.JOB_STATE_DONE and document["result"].get("status") == STATUS_OK
    return float(loss) if is_ok and loss is not None else math.nan


def _within(space: Any, documents: Sequence[Document]) -> Iterator[tuple[Document, Params]]:
    """Yield the documents whose points are in the space, each with its params. Values for missing labels are drawn.

    As in hyperopt, points outside the space are evaluated too, but a sampler cannot learn from them.
    """
    if not documents:
        return
    compiled = compile_space(space)
    subspaces, generator = split(compiled), np.random.default_rng(0)
    for document in documents:
        with suppress(SpaceError):
            point = base.spec_from_misc(document["misc"])
            yield document, complete(compiled, subspaces, point, generator, off_grid=True)[1]


def fmin(  # noqa: PLR0917  # hyperopt's own signature
    fn: Callable[..., Any],
    space: Any,
    algo: Callable[..., Any] | None = None,
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
    early_stop_fn: EarlyStop | None = None,
    trials_save_file: str = "",
) -> Any:
    """Minimise `fn` over `space` with hyperopt's ``fmin``. Return the drawn values of the best trial, by label.

    Arguments and results are those of hyperopt, with these differences. `algo` may be `suggest` of this package's auto,
    tpe (the default), gp, cma, qmc or rand, a ``partial`` of it, or an algorithm of hyperopt. `trials_save_file` is
    replaced atomically, so that a full disk or a killed process does not destroy it. Points to evaluate may lack
    labels, whose values are then drawn. `rstate` may also be a number. `allow_trials_fmin` has no effect.

    Raises UsageError for invalid arguments, SpaceError for a space that cannot be searched, and hyperopt's exceptions.
    """
    if isinstance(space, str) and space == "annotated":
        fn, space = _annotated(fn)
    if algo is not None and not callable(algo):
        raise UsageError(f"algo is {short(algo, 60)}; give auto.suggest, tpe.suggest or another function")
    trials = _trials(trials, points_to_evaluate, trials_save_file)
    _complete(trials, space)
    search = partial(
        hyperopt.fmin,
        _with_status(fn),
        space,
        algo or tpe.suggest,
        # Scripts may give a float, such as 1e3.
        sys.maxsize if max_evals is None else int(max_evals),
        timeout,
        loss_threshold,
        trials,
        _generator(rstate),
        allow_trials_fmin=False,
        pass_expr_memo_ctrl=pass_expr_memo_ctrl,
        catch_eval_exceptions=catch_eval_exceptions,
        verbose=verbose,
        return_argmin=False,
        max_queue_len=max_queue_len,
        show_progressbar=show_progressbar,
        early_stop_fn=_saving(early_stop_fn, trials_save_file) if trials_save_file else early_stop_fn,
    )
    values = _found(search, trials)
    if return_argmin and not len(trials):
        raise _no_trials(trials)
    return trials.argmin if return_argmin else values


def _found(search: Callable[[], Any], trials: hyperopt.Trials) -> Any:
    """Run a search and return its result. Raises NoTrials, with the last failure, if no trial succeeds."""
    try:
        return search()
    except AllTrialsFailed:
        if STATUS_OK in trials.statuses():
            # The exception was raised by the objective itself.
            raise
        raise _no_trials(trials) from None


class NoTrials(NoSuccessfulTrial, AllTrialsFailed):  # type: ignore[misc]  # hyperopt has no types
    """No trial was run, so there is no argmin: see max_evals."""


def _no_trials(trials: hyperopt.Trials) -> NoTrials:
    """Return the error for a search without a successful trial. Its message describes the last failure."""
    ended = [each for each in trials._dynamic_trials if each["state"] != base.JOB_STATE_NEW]
    if not ended:
        return NoTrials()
    last = ended[-1]
    kind, message = last["misc"].get("error") or ("", f"the objective returned {short(last['result'], 200)}")
    what = f"{kind}: {one_line(message)}" if kind else message
    return NoTrials(f"none of {len(ended)} trials has succeeded, so there is no argmin; the last one: {what}")


def _with_status(fn: Callable[..., Any]) -> Callable[..., Any]:
    """Return the objective, wrapped to raise UsageError if it returns a dict without a status.

    hyperopt itself would raise a KeyError without an explanation.
    """

    # `wraps` copies the attributes of the objective, one of which hyperopt reads.
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


def _new_document(number: int, params: Params, domain: Any, trials: Any) -> Document:
    """Return hyperopt's document of a new trial."""
    misc = {
        "tid": number,
        "cmd": domain.cmd,
        "workdir": domain.workdir,
        "idxs": {label: [number] if label in params else [] for label in domain.params},
        "vals": {label: [params[label]] if label in params else [] for label in domain.params},
    }
    [document] = trials.new_trial_docs([number], [None], [domain.new_result()], [misc])
    found: Document = document
    return found


def _annotated(fn: Callable[..., Any]) -> tuple[Callable[..., Any], dict[str, Any]]:
    """Return a function of one dict that calls `fn` with its items, and the space in the annotations of `fn`."""
    space = {name: hint for name, hint in inspect.getfullargspec(fn).annotations.items() if name != "return"}
    for name, hint in space.items():
        if not isinstance(hint, Apply):
            raise InvalidAnnotatedParameter(
                f"the annotation of {name!r} is not an hp expression; write {name}: hp.uniform({name!r}, 0, 1), or "
                "pass a space"
            )
    return lambda values: fn(**values), space


def _trials(given: Any, points: list[dict[str, Any]] | None, save_file: str) -> hyperopt.Trials:
    """Return the Trials object for the search: the given one, or the one in the file, or a new one with the points."""
    if given is not None and points is not None:
        raise UsageError("points_to_evaluate go into new trials; leave out one of trials and points_to_evaluate")
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


def _complete(trials: hyperopt.Trials, space: Any) -> None:
    """Draw values for labels that points to evaluate lack, because hyperopt requires all labels."""
    waiting = [each for each in trials._dynamic_trials if each["state"] == base.JOB_STATE_NEW]
    for document, params in _within(space, waiting):
        misc = document["misc"]
        for label, value in params.items():
            if not misc["vals"].get(label):
                misc["idxs"][label], misc["vals"][label] = [document["tid"]], [value]


def _generator(rstate: Any) -> np.random.Generator | None:
    """Return the random generator for hyperopt, or None if hyperopt should create it from its environment variable."""
    if isinstance(rstate, np.random.RandomState):
        rstate = int(rstate.randint(_MAX_SEED))
    if isinstance(rstate, (int, np.integer)) and not isinstance(rstate, bool):
        return np.random.default_rng(rstate)
    if rstate is None or isinstance(rstate, np.random.Generator):
        return rstate
    raise UsageError(f"rstate is {short(rstate, 60)}; give numpy.random.default_rng(SEED), or a whole number")


def _saving(early_stop: EarlyStop | None, save_file: str) -> EarlyStop:
    """Return a function for `early_stop_fn` that saves the trials, and then does the same as `early_stop`."""

    def saved(trials: hyperopt.Trials, *state: Any) -> tuple[bool, Iterable[Any]]:
        _save(trials, save_file)
        return (False, ()) if early_stop is None else early_stop(trials, *state)

    return saved


def _load(file: Path) -> hyperopt.Trials:
    """Return the trials of an earlier search from a file. Raises UsageError if it does not contain trials."""
    try:
        loaded = pickler.loads(file.read_bytes())
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise UsageError(
            f"trials_save_file {file} cannot be read ({short(cause, 200)}); remove it to begin anew"
        ) from None
    if not isinstance(loaded, hyperopt.Trials):
        raise UsageError(f"trials_save_file {file} has {short(loaded, 60)}, not Trials; name another file")
    return loaded


def _save(trials: hyperopt.Trials, save_file: str) -> None:
    """Write the trials to a file, which is replaced atomically. Raises UsageError if it cannot be written."""
    content = pickler.dumps(trials)
    try:
        with replacing(Path(save_file)) as file:
            file.write(content)
    except OSError as error:
        raise UsageError(
            f"trials_save_file {save_file} cannot be written: {error.strerror}; its earlier content is intact"
        ) from None
