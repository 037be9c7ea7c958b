"""Optuna's samplers: ``optuna:CmaEsSampler`` uses Optuna's class CmaEsSampler, in an Optuna study in memory.

One sampler draws in the whole space, as in Optuna. It chooses an option first, then the labels below this option.
"""

from __future__ import annotations

import importlib.util
import inspect
import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Sequence
from functools import partial
from types import ModuleType
from typing import Any

import numpy as np

from shadho_celery.core.checks import guess, short
from shadho_celery.core.trial import WELL, Params, Trial, TrialState
from shadho_celery.errors import UsageError
from shadho_celery.samplers.random import MakeSampler
from shadho_celery.space.domains import Categorical, Domain, RandInt
from shadho_celery.space.split import Key, Subspace
from shadho_celery.space.tree import Value

#: maximum number of proposals until the space's `where` allows one
REFUSED = 100
#: packages that samplers of Optuna import at their first proposal
_NEEDS = {"CmaEsSampler": "cmaes", "GPSampler": "torch"}


class OptunaSampler:
    """One of Optuna's samplers. Numbers are passed as the unscaled variable in [0, 1], and choices as their options."""

    adaptive, spans_space = True, True

    def __init__(
        self, subspace: Subspace, entropy: Sequence[int], kind: Any, optuna: ModuleType, objectives: int
    ) -> None:
        """Create an Optuna study with this many `objectives` and a sampler of the class `kind`."""
        self._optuna = optuna
        optuna.logging.set_verbosity(optuna.logging.ERROR)
        is_seeded = "seed" in inspect.signature(kind).parameters
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            sampler = kind(seed=int(np.random.SeedSequence(entropy).generate_state(1)[0])) if is_seeded else kind()
        self._name = kind.__name__
        self._is_of_several = objectives > 1
        self._study = optuna.create_study(sampler=sampler, directions=["minimize"] * max(1, objectives))
        self._subspace = subspace
        #: generator of the draws that replace refused proposals
        self._generator = np.random.default_rng(entropy)
        #: Optuna's trials without a result, by params
        self._running: defaultdict[Key, list[Any]] = defaultdict(list)

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return proposals of Optuna. Raises UsageError if the sampler needs a package that is not installed."""
        try:
            # Optuna knows its own pending trials. Warnings of numpy are suppressed, because users cannot act on them.
            with np.errstate(all="ignore"):
                return [self._asked() for _ in range(n)]
        except ImportError as error:  # packages are imported at the first proposal
            raise UsageError(f"Optuna's {self._name} needs a package: {error}; install it") from None
        except ValueError as error:
            raise UsageError(
                f"Optuna's {self._name} cannot search this space: {error}; choose another sampler"
            ) from None

    def tell(self, trials: Sequence[Trial]) -> None:
        """Pass results to Optuna. Raises UsageError for constraints if this version of Optuna does not support them."""
        for trial in trials:
            running = self._running.get(self._subspace.key(trial.params))
            constraints, (state, values, reported) = trial.outcome.constraints, self._result(trial)
            if constraints and not hasattr(self._optuna.Trial, "set_constraint"):
                raise UsageError("samplers of Optuna need version 5 for constraints: pip install 'optuna>=5'")
            if running:
                own = running.pop()
                for name, value in constraints.items():
                    own.set_constraint(name, value)
                for step, loss in reported.items():
                    own.report(loss, step)
                self._study.tell(own, values, state=state)
            elif state != self._optuna.trial.TrialState.FAIL:  # from an earlier run, or enqueued
                self._study.add_trial(self._recorded(trial))

    def _result(self, trial: Trial) -> tuple[Any, list[float] | None, dict[int, float]]:
        """Return Optuna's state of an ended trial, its losses if it is complete, and {step: loss} if it was pruned."""
        states, loss = self._optuna.trial.TrialState, trial.outcome.loss
        if trial.state not in WELL or loss is None or not math.isfinite(loss):
            return states.FAIL, None, {}
        if trial.state is TrialState.PRUNED:
            # Optuna refuses negative steps, and reports in a study with several losses.
            return states.PRUNED, None, {} if self._is_of_several else {max(0, trial.step or 0): loss}
        return states.COMPLETE, [*trial.outcome.losses.values()] if self._is_of_several else [loss], {}

    def _asked(self) -> Params:
        """Return a proposal of Optuna's sampler that the space's `where` allows.

        Optuna is told that refused proposals have failed. After REFUSED of them, return a draw from the prior.
        """
        for _ in range(REFUSED):
            trial, params = self._suggestions()
            if self._subspace.space.allows(params):
                self._running[self._subspace.key(params)].append(trial)
                return params
            self._study.tell(trial, state=self._optuna.trial.TrialState.FAIL)
        return self._subspace.sample(self._generator, 1)[0]

    def _suggestions(self) -> tuple[Any, Params]:
        trial = self._study.ask()
        params = {**self._subspace.fixed}
        domains = self._subspace.space.domains
        # A drawn option activates the labels below it.
        for block in self._subspace.space.walk(params):
            for label in block.labels:
                if label not in params:
                    params[label] = _suggested(trial, label, domains[label])
        return trial, params

    def _recorded(self, trial: Trial) -> Any:
        domains = {label: self._subspace.space.domains[label] for label in trial.params}
        constraints = {"constraints": dict(trial.outcome.constraints)} if trial.outcome.constraints else {}
        state, values, reported = self._result(trial)
        return self._optuna.trial.create_trial(
            state=state,
            values=values,
            intermediate_values=reported,
            params={label: _suggestion(domain, trial.params[label]) for label, domain in domains.items()},
            distributions={label: self._law(domain) for label, domain in domains.items()},
            **constraints,
        )

    def _law(self, domain: Domain) -> Any:
        laws = self._optuna.distributions
        if isinstance(domain, RandInt):
            return laws.IntDistribution(domain.low, domain.high - 1)
        if isinstance(domain, Categorical):
            return laws.CategoricalDistribution(_options(domain))
        return laws.FloatDistribution(0.0, 1.0)


def make_optuna_sampler(name: str, objectives: int) -> MakeSampler:
    """Return a factory of samplers of Optuna's class `name`.

    Raises UsageError if Optuna is not installed, or has no such class.
    """
    try:
        import optuna
    except ImportError:
        raise UsageError('samplers of Optuna need it; in the checkout: pip install -e ".[optuna]"') from None
    if name not in (known := names(optuna)):
        raise UsageError(f"Optuna has no sampler {short(name)}; {guess(name, known)}choose one of {', '.join(known)}")
    if (package := _NEEDS.get(name)) is not None and importlib.util.find_spec(package) is None:
        raise UsageError(f"Optuna's {name} needs the package {package}: pip install {package}")
    return partial(OptunaSampler, kind=getattr(optuna.samplers, name), optuna=optuna, objectives=objectives)


def names(optuna: ModuleType) -> list[str]:
    """Return the names of Optuna's samplers that can be created without arguments."""
    kinds = {name: getattr(optuna.samplers, name) for name in optuna.samplers.__all__ if name.endswith("Sampler")}
    return [name for name, kind in kinds.items() if not inspect.isabstract(kind) and not _needs_arguments(kind)]


def _needs_arguments(kind: Any) -> bool:
    rest = inspect.Parameter.VAR_POSITIONAL, inspect.Parameter.VAR_KEYWORD
    parameters = inspect.signature(kind).parameters.values()
    return any(each.default is each.empty and each.kind not in rest for each in parameters)


def _suggested(trial: Any, label: str, domain: Domain) -> Value:
    if isinstance(domain, RandInt):
        return int(trial.suggest_int(label, domain.low, domain.high - 1))
    if isinstance(domain, Categorical):
        return int(trial.suggest_categorical(label, _options(domain)))
    value: Value = domain.from_unit([trial.suggest_float(label, 0.0, 1.0)]).tolist()[0]
    return value


def _suggestion(domain: Domain, value: Value) -> Value:
    """Return a value of our space as a value of Optuna's distribution."""
    return value if isinstance(domain, RandInt | Categorical) else float(domain.to_unit([value])[0])


def _options(domain: Categorical) -> list[int]:
    return [*range(domain.first, domain.first + domain.count)]
