"""A user's own sampler class. Its params are checked before trials are created from them."""

from __future__ import annotations

import traceback
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from shadho_celery.core.checks import accepts, short
from shadho_celery.core.columns import TrialFacts
from shadho_celery.core.failures import read_failure
from shadho_celery.core.trial import Outcome, Params, Trial
from shadho_celery.errors import SpaceError, UsageError
from shadho_celery.samplers.base import MakeSampler, name_of
from shadho_celery.space.split import Subspace


class ToldTrial(TrialFacts):
    """Trial as a user's sampler sees it: its facts by name, and its outcome, as a sampler of ours reads it."""

    @property
    def outcome(self) -> Outcome:
        """Outcome of the trial: state, losses and failure."""
        return self._trial.outcome


class OwnSampler:
    """A sampler of a user's class. It counts as learning from losses unless its `adaptive` is False."""

    def __init__(self, sampler: Any, subspace: Subspace, name: str) -> None:
        self.sampler, self._subspace, self._name = sampler, subspace, name
        self.adaptive = getattr(sampler, "adaptive", True) is not False

    def ask(self, n: int, pending: Collection[Trial]) -> list[Params]:
        """Return the proposals of the user's sampler.

        Raises UsageError for params outside the space, and for exceptions of the user's code.
        """
        with _named(self._name, "ask"):
            returned = self.sampler.ask(n, [ToldTrial(trial) for trial in pending])
        if not isinstance(returned, Sequence):
            raise UsageError(f"sampler {self._name} returned {short(returned, 60)} from ask; return a list of params")
        asked = [*returned[:n]]
        for params in asked:
            try:
                self._subspace.space.check(params)
            except (SpaceError, TypeError) as error:
                raise UsageError(f"sampler {self._name} proposed {short(params, 200)}: {error}") from None
            if not self._subspace.contains(params):
                raise UsageError(f"sampler {self._name} left subspace {self._subspace.name}: {short(params, 200)}")
        return asked

    def tell(self, trials: Sequence[Trial]) -> None:
        """Pass results to the user's sampler. Raises UsageError for exceptions of the user's code."""
        with _named(self._name, "tell"):
            self.sampler.tell([ToldTrial(trial) for trial in trials])


def make_own_sampler(make: MakeSampler, subspace: Subspace, entropy: Sequence[int]) -> OwnSampler:
    """Return the sampler of a subspace that a user's class or function creates.

    Raises UsageError if it cannot be created, or lacks valid methods.
    """
    name = name_of(make)
    with _named(name, "its constructor"):
        sampler = make(subspace, entropy)
    if missing := [verb for verb in ("ask", "tell") if not callable(getattr(sampler, verb, None))]:
        raise UsageError(f"sampler {name} lacks {' and '.join(missing)}; it needs ask(n, pending) and tell(trials)")
    for verb, arguments in (("ask", "n, pending"), ("tell", "trials")):
        if not accepts(getattr(sampler, verb), len(arguments.split())):
            raise UsageError(f"{verb} of sampler {name} takes other arguments; write def {verb}(self, {arguments})")
    return OwnSampler(sampler, subspace, name)


@contextmanager
def _named(name: str, verb: str) -> Iterator[None]:
    """Convert exceptions of the user's code to a UsageError that names the sampler."""
    try:
        yield
    except (Exception, SystemExit) as error:
        raise UsageError(f"sampler {name} failed in {verb}: {read_failure(traceback.format_exc())}; fix it") from error
