"""hyperopt's own algorithms by name: ``hyperopt:anneal`` calls ``hyperopt.anneal.suggest``.

One sampler spans the whole space, as in hyperopt, and keeps hyperopt's `Trials` in memory.
"""

from __future__ import annotations

import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Sequence
from functools import partial
from typing import Any

import numpy as np

from shadho_celery.core.best import feasible_loss
from shadho_celery.core.checks import guess, one_line, short
from shadho_celery.core.trial import Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.samplers.base import MakeSampler
from shadho_celery.space.domains import Discrete
from shadho_celery.space.space import Space
from shadho_celery.space.split import Key, Subspace

#: prefix of the names of these samplers
HYPEROPT = "hyperopt:"
#: hyperopt's modules whose ``suggest(new_ids, domain, trials, seed)`` needs no further arguments or packages
NAMES = ("tpe", "anneal", "rand")

#: hyperopt's ``suggest``, and its document of a trial, which have no types
Suggest = Callable[..., Any]
Document = dict[str, Any]


class HyperoptSampler:
    """One of hyperopt's algorithms. A trial's seed depends on its place in the stream, so runs can be replayed."""

    adaptive, spans_space = True, True

    def __init__(self, subspace: Subspace, entropy: Sequence[int], suggest: Suggest) -> None:
        """Raise UsageError if hyperopt cannot search the space."""
        from hyperopt import base

        self._base: Any = base
        self._suggest = suggest
        self._subspace, self._entropy = subspace, tuple(entropy)
        self._trials = base.Trials()
        try:
            self._domain = base.Domain(None, subspace.space.graph)
        except Exception as error:
            raise _unable(error) from None
        #: hyperopt's documents of trials without a result, by params
        self._running: defaultdict[Key, list[Document]] = defaultdict(list)
        self._told = 0

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return proposals of hyperopt. Raises UsageError if it cannot search the space."""
        # hyperopt recognises its own pending trials: their documents have no loss.
        first = self._told + len(pending)
        return [self._asked(place) for place in range(first, first + n)]

    def tell(self, trials: Sequence[Trial]) -> None:
        for trial in trials:
            self._told += 1
            running = self._running.get(self._subspace.key(trial.params))
            if not running and trial.state is TrialState.CANCELLED:
                continue
            # Without a document, it is from an earlier run or was enqueued.
            document = running.pop() if running else self._entered(trial.params)
            self._end(document, trial)
        self._trials.refresh()

    def _asked(self, place: int) -> Params:
        seed = int(np.random.SeedSequence([*self._entropy, place]).generate_state(1)[0] >> 1)
        [number] = self._trials.new_trial_ids(1)
        space = self._subspace.space
        try:
            params = suggestion(self._suggest, number, self._domain, self._trials, seed)
        except Exception as error:
            raise _unable(error) from None
        params = {label: _plain(space, label, value) for label, value in params.items()}
        self._running[self._subspace.key(params)].append(self._entered(params, number))
        self._trials.refresh()
        return {label: params[label] for label in space.active(params)}

    def _entered(self, params: Params, number: int | None = None) -> Document:
        """Add a new trial to hyperopt's trials. Return its document."""
        number = self._trials.new_trial_ids(1)[0] if number is None else number
        document = new_document(number, params, self._domain, self._trials)
        document["state"] = self._base.JOB_STATE_RUNNING
        self._trials.insert_trial_docs([document])
        entered: Document = self._trials._dynamic_trials[-1]
        return entered

    def _end(self, document: Document, trial: Trial) -> None:
        loss = feasible_loss(trial)
        is_cancelled = trial.state is TrialState.CANCELLED
        document["state"] = self._base.JOB_STATE_CANCEL if is_cancelled else self._base.JOB_STATE_DONE
        ok, fail = self._base.STATUS_OK, self._base.STATUS_FAIL
        document["result"] = {"status": ok, "loss": loss} if math.isfinite(loss) else {"status": fail}


def make_hyperopt_sampler(name: str, _objectives: int) -> MakeSampler:
    """Return a factory of samplers of one of hyperopt's algorithms. Raises UsageError for an unknown name."""
    if name not in NAMES:
        raise UsageError(f"hyperopt has no sampler {short(name)}; {guess(name, NAMES)}choose one of {', '.join(NAMES)}")
    return partial(HyperoptSampler, suggest=importlib.import_module(f"hyperopt.{name}").suggest)


def suggestion(suggest: Suggest, number: int, domain: Any, trials: Any, seed: int) -> Params:
    """Return the values of the active labels that hyperopt proposes for its trial of this number."""
    # numpy would warn about hyperopt's logarithms of a grid's 0 and its empty mixtures, which are intended.
    with np.errstate(all="ignore"):
        [document] = suggest([number], domain, trials, seed)
    return {label: found[0] for label, found in document["misc"]["vals"].items() if len(found)}


def new_document(number: int, params: Params, domain: Any, trials: Any) -> Document:
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


def _unable(error: Exception) -> UsageError:
    problem = one_line(f"{type(error).__name__}: {error}", 200)
    return UsageError(f"hyperopt cannot search this space: {problem}; choose another sampler")


def _plain(space: Space, label: str, value: Any) -> Any:
    """Return a value as the space draws it."""
    return int(value) if isinstance(space.domains[label], Discrete) else float(value)
