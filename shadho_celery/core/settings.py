"""Settings of a study: one record for STUDY in its file, for the command line, and for Python."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import Annotated, Any

from msgspec import Meta, Struct

from shadho_celery.core.checks import description, misfit_at
from shadho_celery.core.hardware import CLASS_NAME
from shadho_celery.core.objectives import Objectives
from shadho_celery.core.trial import Count, Finite, Number, Positive
from shadho_celery.errors import UsageError

#: width of a trial: a number, a key of the objective's values, or a function of those
SlotsSetting = int | str | Callable[[Any], int]
#: seconds by subspace, or a function of the objective's values; only their proportions matter
Cost = Mapping[str, float] | Callable[[Any], float]

_Name = Annotated[str, Meta(min_length=1)]

#: names of samplers, placement policies, kinds of shares and pruners; known here so that a command's help need not
#: import them
SAMPLERS = ("auto", "random", "tpe", "gp", "qmc", "grid", "cma", "local")
POLICIES = ("cost", "paper", "fifo")
SHARES = ("even", "uniform", "promise", "paper")
FIDELITIES = ("auto", "halving", "hyperband", "asha", "bohb", "dehb")
PRUNERS = ("median", "percentile", "patience", "threshold", "asha")
#: name of the absence of a pruner, for a study that is resumed
NO_PRUNER = "none"

#: most trials that a study may be told to draw ahead
MAX_POOL = 1000

#: limit on the trials of a study that is given no limit
DEFAULT_TRIALS = 100

#: settings that a study keeps for its resumption
KEPT = (
    "trials",
    "seconds",
    "target",
    "sampler",
    "policy",
    "shares",
    "pool",
    "pruner",
    "speculate",
    "weight",
    "trial_timeout",
    "max_failures",
    "early_stop",
)

#: settings that decide which trials a study runs, and where: those in force are kept, defaults too, so that a study
#: goes on as it began under a version with other defaults; and what stands for one that is None
IN_FORCE = ("sampler", "policy", "shares", "pool", "pruner")
UNNAMED: Mapping[str, str] = {"sampler": "of its own", "pool": "by the number of slots"}
#: settings with budgets, of which a study has one at most; they are kept where they are given
BUDGETS = ("rungs", "fidelity")
#: the defaults of the versions whose stores do not have what was in force: up to 0.5
EARLIER_DEFAULTS: Mapping[str, Any] = {
    "sampler": "random",
    "policy": "cost",
    "shares": "uniform",
    "pool": 0,
    "pruner": None,
}


def continued(in_force: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the settings that were `in_force` in an earlier run, for those `given` now to come before.

    Raises UsageError if it had a sampler of its own, which a store cannot keep, and none is given.
    """
    if in_force.get("sampler", "") is None and "sampler" not in given:
        raise UsageError(
            "this study was begun with a sampler of its own: pass that function again, as STUDY['sampler'] in a study "
            "file, or name one, see --sampler"
        )
    # A limit is that of one run: it is kept to be shown.
    return {name: value for name, value in in_force.items() if value is not None and name != "trials"}


def other_sampler(before: Any, now: Any, trials: int) -> str | None:
    """Return a line if a study of so many trials goes on with another sampler than before; None is one of its own."""
    if before == now:
        return None
    before, now = (UNNAMED["sampler"] if name is None else name for name in (before, now))
    return f"sampler {now} from now on, {before} until now: it learns from the {trials} trials so far"


class StudySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a study, each with the description that a refusal shows."""

    trials: Annotated[Count | None, Meta(description="limit on the trials of the study, a whole number from 1")] = None
    seconds: Annotated[Finite | None, Meta(description="limit on the seconds of one run, a number")] = None
    target: Annotated[Finite | None, Meta(description="a loss that is good enough, a number")] = None
    early_stop: Annotated[
        Count | None,
        Meta(description="trials without a better feasible loss after which the study ends, a whole number from 1"),
    ] = None
    objectives: Annotated[
        Objectives | None,
        Meta(
            description='losses by name, "minimize" or "maximize" each, such as {"error": "minimize", "f1": "maximize"}'
            ": 1 to 10 names, of 1 to 60 characters without line breaks"
        ),
    ] = None
    sampler: Annotated[Any, Meta(description="such as auto, gp, tpe or random, or a class in the study file")] = "auto"
    policy: Annotated[_Name, Meta(description="name of the placement policy")] = "cost"
    shares: Annotated[_Name | None, Meta(description="how trials are shared out between subspaces")] = None
    pool: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_POOL)] | None,
        Meta(description="trials drawn ahead for policy cost to place by their params, 0 for none"),
    ] = None
    cost: Annotated[
        Any, Meta(description="seconds by subspace, or a function of params; only their proportions matter")
    ] = None
    classes: Annotated[
        tuple[Annotated[str, Meta(pattern=CLASS_NAME)], ...],
        Meta(
            description="compute classes the study expects, the strongest first: a list of names of up to 60 "
            "characters, without commas"
        ),
    ] = ()
    cores: Annotated[Count, Meta(description="cores that one trial uses")] = 1
    slots: Annotated[
        Any,
        Meta(description="slots of one class that a trial takes: a number, a key of the params, or a function of them"),
    ] = 1
    gang_wait_seconds: Annotated[
        Positive, Meta(description="seconds after which a trial whose slots do not come together waits again")
    ] = 60.0
    rungs: Annotated[
        Mapping[str, Any] | None,
        Meta(description="budgets of halving, a dict such as {'least': 1, 'most': 9, 'eta': 3, 'backups': 0}"),
    ] = None
    pruner: Annotated[
        Any,
        Meta(description="what stops a trial early by its reports: median, percentile:25, asha or the like, or a dict"),
    ] = None
    fidelity: Annotated[
        Mapping[str, Any] | None,
        Meta(
            description="budgets of trials, a dict such as {'least': 1, 'most': 81, 'eta': 3, 'how': 'asha'}; what "
            "stops trials by their reports is the pruner"
        ),
    ] = None
    speculate: Annotated[bool, Meta(description="whether late trials are copied to idle slots: True or False")] = True
    weight: Annotated[Positive, Meta(description="the study's part of the slot seconds beside other studies")] = 1.0
    trial_timeout: Annotated[
        Positive | None, Meta(description="seconds after which a trial is stopped, more than 0")
    ] = None
    max_failures: Annotated[
        Number,
        Meta(description="first trials that may all fail in one way before the study stops, 0 for any number"),
    ] = 10

    def __post_init__(self) -> None:
        # msgspec has no type for a function.
        if not (self.cost is None or callable(self.cost) or isinstance(self.cost, Mapping)):
            raise misfit_at("cost", "give a mapping or a function")
        if not (callable(self.sampler) or (isinstance(self.sampler, str) and self.sampler)):
            raise misfit_at("sampler", "give a name, or a class of your own")
        is_count = isinstance(self.slots, int) and not isinstance(self.slots, bool) and self.slots > 0
        if not (is_count or callable(self.slots) or (isinstance(self.slots, str) and self.slots)):
            raise misfit_at("slots", "give a number from 1, a key or a function")

    def in_force(self) -> dict[str, Any]:
        """Return the settings that a study keeps as they are in force."""
        own: dict[str, Any] = {"sampler": None} if callable(self.sampler) else {}
        own |= {"objectives": dict(self.objectives)} if self.objectives else {}
        own |= {} if self.trials is None else {"trials": self.trials}
        own |= {name: dict(given) for name in BUDGETS if (given := getattr(self, name))}
        return {name: getattr(self, name) for name in IN_FORCE} | {"shares": self.shares_in_force} | own

    @property
    def least_budget(self) -> float | None:
        """The lowest budget; None for a study without budgets."""
        given = self.fidelity or self.rungs
        least = None if given is None else given.get("least", 1)
        return float(least) if isinstance(least, (int, float)) else None

    @property
    def has_several(self) -> bool:
        """True for a study of several losses."""
        return len(self.objectives or ()) > 1

    @property
    def shares_in_force(self) -> str:
        """Name of the shares: those that are given, else by the policy, and by the sampler.

        Of several losses no chance of a better one is known, so shares by promise are not their default.
        """
        if self.shares is not None:
            return self.shares
        by_promise = self.sampler == "auto" and not self.has_several
        return "paper" if self.policy == "paper" else "promise" if by_promise else "even"

    @classmethod
    def meaning(cls, name: str) -> str:
        """Return the description of a setting."""
        return description(cls, name)
