"""Settings of a study, each described once: for STUDY in a study file, for the command line, and for Python.

A new setting needs a field of `StudySettings` with its description, and the code that uses it. If `minimize` or
`Study` should accept it, it also needs an argument there; a test compares them.

The module also has the type of the argument `resume`, and a decorator that refuses unknown arguments.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from textwrap import fill
from typing import Annotated, Any, Literal, ParamSpec, TypeAlias, TypeVar, get_args, get_type_hints

import msgspec
from msgspec import Meta, Struct
from msgspec.structs import replace

from shadho_celery.core.checks import guess, misfit, misfit_at, one_line, plain, short
from shadho_celery.core.hardware import CLASS_NAME, CLASS_NAME_FORM
from shadho_celery.core.names import NO_PRUNER, NO_TRACK, POLICIES, PRUNERS, SAMPLERS, SHARES, TRACKERS, WHOLE_SAMPLERS
from shadho_celery.core.trial import Count, Direction, Finite, Number, Objectives, Positive, TimeLimit
from shadho_celery.core.units import seconds_of
from shadho_celery.errors import UsageError

F = TypeVar("F", bound=Callable[..., Any])

#: number of slots or GPUs of a trial: a number, a key of the objective's values, or a function of these values. For
#: GPUs, also a list of numbers among which the scheduler chooses
SlotsSetting = int | str | Callable[[Any], int] | Sequence[int]
#: expected seconds of a trial, by subspace or as a function of the objective's values. Only their proportions matter
Cost = Mapping[str, float] | Callable[[Any], float]

_Name = Annotated[str, Meta(min_length=1)]
#: regular expression of a part of a relative path or glob; such a path; a list of paths; a word of a command; its words
_PART = r"(\*\*|(?!\.{1,2}(/|\Z))([^/*\0]|\*(?!\*))+)"
_Path = Annotated[str, Meta(pattern=rf"^(\./)?{_PART}(/{_PART})*/?\Z", max_length=1000)]
_Paths = Annotated[tuple[_Path, ...], Meta(max_length=1000)]
_Word = Annotated[str, Meta(pattern=r"^[^\0]*\Z", max_length=10_000)]
_Words = Annotated[tuple[_Word, ...], Meta(min_length=1, max_length=1000)]

#: settings that are allowed only with the setting `command`
OF_COMMANDS = ("arg", "loss", "inputs", "outputs")

#: maximum of the setting `pool`, the number of trials that are drawn ahead
MAX_POOL = 1000

#: maximum number of best trials whose folders the setting `keep` keeps
MAX_KEPT = 10_000

#: limit on the trials of a study for which no limit is given
DEFAULT_TRIALS = 100

#: by name of a setting: text that is shown if its value in force is None
UNNAMED: Mapping[str, str] = {"sampler": "of its own", "pool": "by the number of slots"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """Description of a setting. Its type is that of the field in `StudySettings`."""

    name: str
    #: description of valid values, for error messages
    meaning: str
    default: Any = None
    #: help text of the command's option; "" for a setting without an option
    help: str = ""
    #: text of the default in help, if it is not `default`; "" if no default is shown
    shown_default: str | None = None
    #: name of the option, if it is not the name of the setting
    option: str = ""
    #: one-letter form of the option, such as -n; "" if it has none
    short: str = ""
    #: value that the option sets, if it is a flag such as --maximize; None for options with a value
    value: str | None = None
    #: placeholder of the value in the help text
    metavar: str | None = None
    #: all valid values; empty if any value of the type is valid
    choices: Collection[str] = ()
    #: True if a study records the value in force, even if it is the default, so that a version with another default can
    #: resume the study unchanged
    in_force: bool = False
    #: True if it may change while the study runs
    is_changeable: bool = False

    @property
    def kinds(self) -> frozenset[type]:
        """Types that the value may have, without their bounds."""
        hint = get_type_hints(StudySettings)[self.name]
        return frozenset(get_args(hint) or (hint,))

    @property
    def flag(self) -> str:
        """Name of the command's option; for a setting without an option, its key in a study file."""
        return f"--{self.option or self.name.replace('_', '-')}" if self.help else f'STUDY["{self.name}"]'


def _about(meaning: str, **known: Any) -> Meta:
    """Return the annotation that describes a field. `known` are further attributes of its `Setting`."""
    return Meta(description=meaning, extra=known)


class StudySettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """Settings of a study, checked when they are created. The annotation of each field describes the setting."""

    trials: Annotated[
        Count | None,
        _about(
            "limit on the trials of the study, a whole number from 1",
            help="Maximum number of trials of the study, including failed ones.",
            shown_default=str(DEFAULT_TRIALS),
            short="-n",
            is_changeable=True,
        ),
    ] = None
    seconds: Annotated[
        Finite | None,
        _about(
            "limit on the seconds of one run, a number",
            help="Seconds after which no new trial is sent.",
            is_changeable=True,
        ),
    ] = None
    target: Annotated[
        Finite | None,
        _about(
            "a loss that is good enough, a number",
            help="Stop at a feasible loss of at most this, or of at least this if it is maximised; for one loss.",
            is_changeable=True,
        ),
    ] = None
    early_stop: Annotated[
        Count | None,
        _about(
            "trials without a better feasible loss after which the study ends, a whole number from 1",
            help="Stop after N trials without a better feasible loss; with several losses, without a change of the "
            "front.",
            metavar="N",
            is_changeable=True,
        ),
    ] = None
    max_cost: Annotated[
        Positive | None,
        _about(
            "money that the trials may cost, by the prices that workers announce, a number above 0",
            help="Send no new trial once the attempts so far have cost this much, by the workers' prices (worker "
            "--price). Running trials finish.",
            metavar="MONEY",
            is_changeable=True,
        ),
    ] = None
    objectives: Annotated[
        Objectives | None,
        _about(
            'losses by name, "minimize" or "maximize" each, such as {"error": "minimize", "f1": "maximize"}'
            ": 1 to 10 names, of 1 to 60 characters without line breaks",
        ),
    ] = None
    direction: Annotated[
        Direction | None,
        _about(
            'whether the loss is to be small or large: "minimize" or "maximize"; short for one of the objectives',
            help="Maximise the loss, such as an accuracy, instead of minimising it.",
            shown_default="",
            option="maximize",
            value="maximize",
        ),
    ] = None
    sampler: Annotated[
        Any,
        _about(
            "such as auto, gp, tpe or random, or a class in the study file",
            help="Sampler that proposes params; optuna:CmaEsSampler for those of Optuna.",
            metavar=f"[{'|'.join(SAMPLERS)}|optuna:NAME]",
            in_force=True,
        ),
    ] = "auto"
    policy: Annotated[
        _Name,
        _about(
            "name of the placement policy",
            help="Policy that decides which compute class runs a trial.",
            choices=POLICIES,
            in_force=True,
        ),
    ] = "cost"
    place_by: Annotated[
        Literal["time", "money"],
        _about(
            'what placement saves: "time" or "money"',
            help="What placement saves. time: all slots are used. money: only the slots that trials need to end by "
            "--deadline for the least money, by the workers' prices (worker --price).",
            choices=("time", "money"),
        ),
    ] = "time"
    deadline: Annotated[
        Positive | str | None,
        _about(
            "time of one run in which its trials should end, with place_by money: seconds, or a text such as 4h",
            help="Time in which the run should reach its limit on trials, such as 90m or 4h; for --place-by money.",
            metavar="TIME",
        ),
    ] = None
    shares: Annotated[
        _Name | None,
        _about(
            "how trials are divided among subspaces",
            help="Division of trials among subspaces. uniform: by the probabilities of the space. even: the same, but "
            "a tenth of its share for a subspace whose trials all fail. promise: more for subspaces where a better "
            "loss is likely. paper: by the ranks of --policy paper; the division then depends on timing, too.",
            shown_default="promise with the samplers auto, gp and tpe, else even; with --policy paper: paper",
            choices=SHARES,
            in_force=True,
        ),
    ] = None
    pool: Annotated[
        Annotated[int, Meta(ge=0, le=MAX_POOL)] | None,
        _about(
            "trials drawn ahead for policy cost to place by their params, 0 for none",
            help="Number of trials that policy cost draws ahead, to choose a suitable one for each slot; 0 for none.",
            shown_default="by the number of slots",
            metavar="N",
            in_force=True,
        ),
    ] = None
    pruner: Annotated[
        Any,
        _about(
            "what stops a trial early by its reports: median, percentile:25, asha or the like, or a dict",
            help="Rule that stops a trial early by its reports. median: worse than the median of the complete trials. "
            "percentile:25: not in their best quarter. patience:10: ten steps without gain. threshold:100: worse than "
            "100. asha:3: not in the best third at steps 1, 3, 9, ...",
            shown_default=NO_PRUNER,
            metavar=f"[{'|'.join((*PRUNERS, NO_PRUNER))}]",
            in_force=True,
        ),
    ] = None
    fidelity: Annotated[
        Mapping[str, Any] | None,
        _about(
            "budgets of trials, a dict such as {'least': 1, 'most': 81, 'eta': 3, 'how': 'asha'}; what stops trials "
            "by their reports is the pruner",
        ),
    ] = None
    repeats: Annotated[
        Count,
        _about(
            "results of each of the best trials, under other seeds; their mean counts: a whole number from 1",
            help="Number of results of each of the three best trials: N - 1 further trials repeat its params under "
            "other seeds. The best trial is the one with the best mean. For one noisy loss.",
            metavar="N",
        ),
    ] = 1
    keep: Annotated[
        Annotated[Mapping[Literal["best"], Annotated[int, Meta(ge=1, le=MAX_KEPT)]], Meta(min_length=1)] | None,
        _about(
            'checkpoint folders that are kept: {"best": 3} for those of the three best trials, a whole number from 1',
        ),
    ] = None
    track: Annotated[
        _Name | None,
        _about(
            f"tools that show the ended trials, {', '.join(TRACKERS)}, with a URI after a colon if needed, such as "
            f"'mlflow:sqlite:///mlflow.db,tensorboard'; {NO_TRACK} for none",
            help="Show ended trials in other tools, too; several are joined by commas. URI: MLflow's tracking URI, "
            "[ENTITY/]PROJECT of W&B, or the folder for TensorBoard.",
            metavar=f"[{'|'.join((*TRACKERS, NO_TRACK))}][:URI]",
        ),
    ] = None
    speculate: Annotated[
        bool,
        _about(
            "whether late trials are copied to idle slots: True or False",
            help="Copy a late trial to an idle slot of another machine. The first result counts.",
            shown_default="speculation",
            option="speculation",
        ),
    ] = True
    weight: Annotated[
        Positive,
        _about(
            "the study's part of the slot seconds beside other studies, a number above 0",
            help="Weight of the study when several studies share slots.",
            shown_default="1",
            is_changeable=True,
        ),
    ] = 1.0
    at_once: Annotated[
        Count | None,
        _about(
            "most trials of the study at a time, a whole number from 1",
            help="Most trials at a time on all machines together, such as the number of licences. Copies count, too.",
            shown_default="as many as there are slots",
            metavar="N",
            is_changeable=True,
        ),
    ] = None
    trial_timeout: Annotated[
        TimeLimit | None,
        _about(
            "seconds after which a trial is stopped, more than 0 and at most 1e9",
            help="Time limit of a trial. The objective then gets a TrialTimeout, and is killed five seconds later.",
            metavar="SECONDS",
            is_changeable=True,
        ),
    ] = None
    max_failures: Annotated[
        Number,
        _about(
            "first trials that may all fail in one way before the study stops, 0 for any number",
            help="Stop if the first N trials all fail in the same way; 0 for never.",
            metavar="N",
        ),
    ] = 10
    cost: Annotated[Any, _about("seconds by subspace, or a function of params; only their proportions matter")] = None
    where: Annotated[
        Any,
        _about(
            "bounds between params, a function of the objective's values such as lambda p: p['low'] < p['high']",
        ),
    ] = None
    classes: Annotated[
        tuple[Annotated[str, Meta(pattern=CLASS_NAME)], ...],
        _about(f"compute classes the study expects, the strongest first: a list of names, each of {CLASS_NAME_FORM}"),
    ] = ()
    cores: Annotated[Count, _about("cores that one trial uses, a whole number from 1")] = 1
    slots: Annotated[
        Any,
        _about("slots of one class that a trial takes: a number, a key of the params, or a function of them"),
    ] = 1
    gpus: Annotated[
        Any,
        _about(
            "GPUs of one worker that a trial takes, or slots of a worker without GPUs: a number, a key of the params, "
            "a function of them, or a list of numbers, of which each trial gets the one that costs least GPU time"
        ),
    ] = None
    preload: Annotated[
        tuple[Annotated[str, Meta(pattern=r"\A[A-Za-z_][\w.]{0,199}\Z")], ...],
        _about("libraries that workers import once and not again for each new process: a list such as ['torch']"),
    ] = ()
    fresh: Annotated[bool, _about("whether each trial runs in a new process: True or False")] = False
    command: Annotated[
        _Words | None, _about("a program and its arguments, a list of texts such as ['python', 'train.py', '{args}']")
    ] = None
    arg: Annotated[
        Annotated[str, Meta(pattern=r"^[^{}]*\{label\}[^{}]*\{value\}[^{}]*\Z")] | None,
        _about("form of the arguments in place of {args} in the command, such as '--{label}={value}'"),
    ] = None
    loss: Annotated[
        _Name | Mapping[str, Any] | None,
        _about("name before the loss in the output of the command, or {'pattern': a regular expression with a group}"),
    ] = None
    inputs: Annotated[_Paths, _about("files that the command reads, a list of paths or globs below its folder")] = ()
    outputs: Annotated[
        _Paths, _about("files of the command that are kept, a list of paths or globs below its folder")
    ] = ()
    gang_wait_seconds: Annotated[
        Positive, _about("seconds after which a trial whose slots do not come together waits again")
    ] = 60.0

    def __post_init__(self) -> None:
        # These types are checked here, because msgspec has no type for functions.
        if not (self.cost is None or callable(self.cost) or isinstance(self.cost, Mapping)):
            raise misfit_at("cost", "give a mapping or a function")
        if not (self.where is None or callable(self.where)):
            raise misfit_at("where", "give a function")
        if not (callable(self.sampler) or (isinstance(self.sampler, str) and self.sampler)):
            raise misfit_at("sampler", "give a name, or a class of your own")
        if not (self.pruner is None or isinstance(self.pruner, (str, Mapping))):
            raise misfit_at("pruner", "give a name, or a dict")
        self._check_widths()
        if isinstance(self.deadline, str):
            try:
                seconds_of(self.deadline)
            except ValueError as error:
                raise misfit_at("deadline", str(error)) from None

    def _check_widths(self) -> None:
        for name in ("slots",) if self.gpus is None else ("slots", "gpus"):
            given = getattr(self, name)
            if isinstance(given, (list, tuple)) and name == "gpus":
                if not given or not all(_is_width(each) and isinstance(each, int) for each in given):
                    raise misfit_at(name, "a list needs whole numbers from 1, such as [1, 2, 4]")
            elif not _is_width(given):
                raise misfit_at(name, "give a number from 1, a key or a function")
        if self.widths and self.place_by == "money":
            raise misfit_at("gpus", "trials that are placed by money need one number of GPUs; give a number")
        if self.gpus is not None and self.slots != 1:
            raise misfit_at("gpus", "slots may be on several workers and gpus are on one; leave out one of the two")

    @property
    def width(self) -> tuple[str, SlotsSetting]:
        """Name and value of the setting that determines the number of slots of a trial: `gpus` if it is given, else
        `slots`.
        """
        return ("slots", self.slots) if self.gpus is None else ("gpus", self.gpus)

    @property
    def widths(self) -> tuple[int, ...]:
        """Numbers of GPUs among which the scheduler chooses for each trial, in rising order; () if it does
        not choose.
        """
        return tuple(sorted(set(self.gpus))) if isinstance(self.gpus, (list, tuple)) else ()

    def in_force(self) -> dict[str, Any]:
        """Return the settings that a study records as its settings in force."""
        own: dict[str, Any] = {"sampler": None} if callable(self.sampler) else {}
        own |= {"objectives": dict(self.objectives)} if self.objectives else {}
        own |= {} if self.trials is None else {"trials": self.trials}
        own |= {} if self.repeats == 1 else {"repeats": self.repeats}
        own |= {} if self.command is None else {"command": [*self.command]}
        own |= {name: dict(given) for name in (*BUDGETS, "keep") if (given := getattr(self, name))}
        return {name: getattr(self, name) for name in IN_FORCE} | {"shares": self.shares_in_force} | own

    @property
    def least_budget(self) -> float | None:
        """The lowest budget; None for a study without budgets."""
        least = None if self.fidelity is None else self.fidelity.get("least", 1)
        return float(least) if isinstance(least, (int, float)) else None

    @property
    def deadline_seconds(self) -> float | None:
        """The deadline in seconds from the start of a run; None without a deadline."""
        return seconds_of(self.deadline) if isinstance(self.deadline, str) else self.deadline

    @property
    def has_several(self) -> bool:
        """True for a study with several losses."""
        return len(self.objectives or ()) > 1

    @property
    def shares_in_force(self) -> str:
        """Name of the shares: the setting, or a default that depends on the policy and the sampler.

        The default for several losses is not `promise`, which needs the probability of a better loss.
        """
        if self.shares is not None:
            return self.shares
        by_promise = self.sampler in WHOLE_SAMPLERS and not self.has_several
        return "paper" if self.policy == "paper" else "promise" if by_promise else "even"


def _is_width(given: object) -> bool:
    is_count = isinstance(given, int) and not isinstance(given, bool) and given > 0
    return is_count or callable(given) or (isinstance(given, str) and bool(given))


def _described() -> dict[str, Setting]:
    """Return the descriptions of the settings by name, from the annotations of `StudySettings`."""
    hints = get_type_hints(StudySettings, include_extras=True)
    defaults = StudySettings()
    return {
        name: Setting(name=name, meaning=meta.description, default=getattr(defaults, name), **meta.extra)
        for name in StudySettings.__struct_fields__
        for meta in hints[name].__metadata__
        if meta.extra is not None
    }


#: by name: all settings, in the order of help texts
SETTINGS: Mapping[str, Setting] = _described()
#: names of the settings with an option; a study records their given values for later runs
KEPT = tuple(name for name, each in SETTINGS.items() if each.help)
#: names of the settings whose values in force are recorded: they decide which trials a study runs, and where
IN_FORCE = tuple(name for name, each in SETTINGS.items() if each.in_force)
#: names of the settings that may change while the study runs
CHANGEABLE = tuple(name for name, each in SETTINGS.items() if each.is_changeable)
#: names of the settings that give trials budgets. A study records them if they are given
BUDGETS = ("fidelity",)


def as_options(settings: Mapping[str, Any]) -> list[str]:
    """Return the options of a command that set these settings. Settings without an option are left out."""
    found = []
    for name in KEPT:
        value, setting = settings.get(name), SETTINGS[name]
        is_given = isinstance(value, (int, float, str)) and value != setting.default
        if is_given and setting.value in {None, value}:
            # Settings that are bools are True by default, so only False needs an option.
            flag = setting.flag if value is not False else f"--no-{setting.option}"
            found += [flag] if isinstance(value, bool) or setting.value else [flag, str(value)]
    return found


def read_settings(given: Mapping[str, object]) -> StudySettings:
    """Convert plain values to settings. Raises UsageError, with the name of the first invalid setting."""
    try:
        return _directed(msgspec.convert(plain(given), StudySettings))
    except msgspec.ValidationError as error:
        if unknown := [name for name in given if name not in SETTINGS]:
            raise no_setting(unknown[0]) from None
        key, what = misfit(error, given, StudySettings)
        name, _, part = key.partition(".")
        # A regular expression in the message is replaced, because the setting's description is clearer.
        what = f"{short(given[name])} is not allowed" if "regex" in what else f"{part}: {what}" if part else what
        raise UsageError(f"{name}: {what}; {SETTINGS[name].meaning}") from None


def with_settings(function: F) -> F:
    """Append descriptions of those arguments that are settings to a function's docstring. Used as a decorator."""
    arguments = inspect.signature(function).parameters
    described = [each for name, each in SETTINGS.items() if name in arguments]
    lines = [fill(f"`{each.name}`: {each.meaning}. {each.help}", 120, subsequent_indent="    ") for each in described]
    function.__doc__ = "\n".join([inspect.cleandoc(function.__doc__ or ""), "", *lines])
    return function


def _directed(settings: StudySettings) -> StudySettings:
    """Return the settings with `direction` replaced by `objectives`. Raises UsageError if both are given and differ."""
    if settings.direction is None:
        return settings
    objectives: Objectives | None = {"loss": "maximize"} if settings.direction == "maximize" else None
    if settings.objectives not in (None, objectives):
        raise UsageError("direction (--maximize) is short for objectives; leave out one of them")
    return replace(settings, direction=None, objectives=objectives)


def no_setting(name: object) -> UsageError:
    """Return the error for a key of STUDY that is not a setting."""
    shown = f'"{one_line(name, 60)}"' if isinstance(name, str) else short(name, 60)
    return UsageError(f"STUDY[{shown}] is not a setting; {guess(name, SETTINGS)}known are {', '.join(SETTINGS)}")


def continued(in_force: Mapping[str, Any], given: Collection[str]) -> dict[str, Any]:
    """Return the settings `in_force` of an earlier run that apply to the next run.

    `given` are the names of the settings that are given for the next run. Raises UsageError if the earlier run had a
    user's own sampler, which a store cannot keep, and no sampler is given.
    """
    if in_force.get("sampler", "") is None and "sampler" not in given:
        raise UsageError(
            'this study was begun with a sampler of its own: pass that function again, as STUDY["sampler"] in a study '
            "file, or give the name of one (sampler)"
        )
    # The limit on trials applies only to its own run, and is recorded only to be shown. If `keep` is not given for the
    # next run, all folders are kept from then on.
    return {name: value for name, value in in_force.items() if value is not None and name not in ("trials", "keep")}


def other_sampler(before: Any, now: Any, trials: int) -> str | None:
    """Return a line about the change if a study continues with another sampler after `trials` trials, else None.

    `before` and `now` are names of samplers; None means a user's own sampler.
    """
    if before == now:
        return None
    before, now = (UNNAMED["sampler"] if name is None else name for name in (before, now))
    return f"sampler {now} from now on, {before} until now: it learns from the {trials} trials so far"


P = ParamSpec("P")
R = TypeVar("R")

#: True to resume a study, False to begin one; "if-exists" to resume it if there is a study with its name
Resume: TypeAlias = bool | Literal["if-exists"]


def refuse_unknown(function: Callable[P, R]) -> Callable[P, R]:
    """Let a function raise UsageError for an unknown argument, with a similar name as a hint. Used as a decorator."""
    known = [name for name in inspect.signature(function).parameters if name != "self"]

    @wraps(function)
    def checked(*args: P.args, **named: P.kwargs) -> R:
        for name in named:
            if name not in known:
                called = function.__qualname__.removesuffix(".__init__")
                raise UsageError(
                    f"{called} has no argument {name}; {guess(name, known)}its arguments are {', '.join(known)}"
                )
        return function(*args, **named)

    return checked
