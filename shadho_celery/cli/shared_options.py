"""Base class and error handling of all commands, options that several commands have, and output of recorded studies.

There are options for the servers of a fleet, the store, metrics, JSON and the settings of a study. The URLs of broker
and Redis may also come from a file or the environment.
"""

from __future__ import annotations

import io
import json
import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial, wraps
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeVar

import click

from shadho_celery.cli.interrupts import INTERRUPTED
from shadho_celery.cli.messages import readable_warnings, say
from shadho_celery.core.addresses import LOOPBACK
from shadho_celery.core.checks import mask, printable, printable_json, short, similar
from shadho_celery.core.files import read_text, replacing
from shadho_celery.core.names import FORMS, elsewhere
from shadho_celery.core.payload import MODULE_NAME
from shadho_celery.core.settings import SETTINGS, Setting, read_settings
from shadho_celery.core.system import overridden
from shadho_celery.core.units import seconds_of
from shadho_celery.errors import ShadhoError, UsageError
from shadho_celery.fleet import urls
from shadho_celery.fleet.signing import KEY_FILE, UNSIGNED_CONTROL, Signer, read_keys
from shadho_celery.fleet.urls import BROKER, DEFAULTS, OWN_BROKER, REDIS
from shadho_celery.metrics.server import HOST, PORT
from shadho_celery.store.base import DEFAULT_STORE

if TYPE_CHECKING:
    from shadho_celery.results.study import StudyResults

F = TypeVar("F", bound=Callable[..., object])
T = TypeVar("T")

#: type of an option that names a file to write
FILE = click.Path(path_type=Path, dir_okay=False)
#: value of such an option for standard output
STDOUT = Path("-")
#: environment variable with the URL of the store, if --store is not given
STORE_VARIABLE = "SHADHO_STORE"


class Duration(click.ParamType):  # type: ignore[type-arg]  # it is not generic before click 8.4
    """A duration such as ``90s`` or ``4h``, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


def duration_option(*names: str, **settings: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option whose value is a duration, in seconds."""
    return click.option(*names, **{"type": Duration(), "metavar": "DURATION", "show_default": True, **settings})


class Command(click.Command):
    """A command that refuses an option which is given twice. click itself would silently use the last value."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        except click.NoSuchOption as error:
            flags = {name: each.flag for name, each in SETTINGS.items()}
            names = flags if any(each.name in flags for each in self.params) else {}
            names |= {flag.lstrip("-").replace("-", "_"): flag for each in self.params for flag in each.opts}
            here = elsewhere(error.option_name.lstrip("-"), names)
            # click would sort its guesses by name.
            near = similar(error.option_name, (flag for each in self.params for flag in each.opts)).strip()
            if hint := f"here it is {names.get(here, here)}" if here else near:
                raise click.UsageError(f"No such option {error.option_name}; {hint}", ctx) from None
            raise
        for place, parameter in enumerate(given):
            is_flag = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
            is_once = isinstance(parameter, click.Option) and not parameter.multiple and not is_flag
            if is_once and parameter in given[:place]:
                raise click.UsageError(f"{max(parameter.opts, key=len)} is given twice; give it once", ctx)
        return super().parse_args(ctx, args)


def command(*examples: str, more: str = "", **settings: Any) -> Callable[[Callable[..., Any]], click.Command]:
    """Return a decorator that makes a `Command` whose help ends with `examples` and the text `more`.

    An example gets the prefix "shadho-celery" unless it contains that name.
    """
    is_whole = re.compile("[^#]*shadho[-_]celery")
    lines = (f"  {each if is_whole.match(each) else f'shadho-celery {each}'}" for each in examples)
    epilog = "\n".join(["", "\b", "Examples:", *lines, *(["", "\b", more] if more else [])])
    return click.command(epilog=epilog, **{"cls": Command, **settings})


def file_options(command: F) -> F:
    """Add the options --url-file and --signing-key-file to a command."""
    command = click.option(
        "--signing-key-file",
        type=click.Path(),
        help="Key that signs messages and results, the same on all machines; unsigned ones are refused. A key in a "
        "second line is accepted, too. Make one: openssl rand -hex 32 > shadho.key; chmod 600 shadho.key  "
        f"[env: {KEY_FILE}]",
    )(command)
    return click.option("--url-file", type=click.Path(), help=f"File with lines {BROKER}=URL and {REDIS}=URL.")(command)


def fleet_options(command: F) -> F:
    """Add the options --broker, --redis, --url-file and --signing-key-file to a command."""
    command = click.option("--redis", metavar="URL", help=f"Redis of the fleet.  [env: {REDIS}]")(file_options(command))
    return click.option(
        "--broker", metavar="URL", help=f"Broker of the fleet, amqp:// or redis://.  [env: {OWN_BROKER}, {BROKER}]"
    )(command)


def on_fleet(command: Callable[..., T]) -> Callable[..., T]:
    """Add `fleet_options` to a command, which runs with their values in the environment."""

    @wraps(command)
    def run(
        *, broker: str | None, redis: str | None, url_file: str | None, signing_key_file: str | None, **given: Any
    ) -> T:
        with overridden(environment(broker, redis, url_file, signing_key_file)):
            return command(**given)

    return fleet_options(run)


def variable_option(variable: str, *names: str, **form: Any) -> Callable[[F], F]:
    """Return a decorator that adds an option. Its value is put into an environment variable, where programs read it."""

    def note(_: object, __: object, value: Any) -> None:
        if value is not None and value is not False:
            os.environ[variable] = "1" if value is True else f"{value:f}" if isinstance(value, float) else str(value)

    return click.option(*names, expose_value=False, callback=note, **form)


price_option = variable_option(
    "SHADHO_PRICE", "--price", metavar="MONEY", help="Money that a slot costs an hour, for reports and --max-cost."
)


def control_option(command: F) -> F:
    """Add --allow-unsigned-control to a command that starts a process which carries out users' requests."""
    return variable_option(
        UNSIGNED_CONTROL,
        "--allow-unsigned-control",
        is_flag=True,
        help="Without a signing key: obey requests such as those of shadho-celery drain from anyone who can write to "
        f"Redis.  [env: {UNSIGNED_CONTROL}=1]",
    )(command)


def environment(
    broker: str | None, redis: str | None, url_file: str | None, signing_key_file: str | None = None
) -> dict[str, str]:
    """Return the environment variables for these options. An option overrides the same setting in the file of URLs.

    Raises UsageError if a file cannot be read or parsed. Warns about passwords that other users can see.
    """
    urls.prefer_own()
    found = _read(Path(url_file).expanduser()) if url_file else {}
    for variable, option, url in ((BROKER, "--broker", broker), (REDIS, "--redis", redis)):
        if url:
            warn_of_password(option, url, f"{variable} or a --url-file")
            found[variable] = url
    if BROKER in found:
        found[OWN_BROKER] = found[BROKER]
    if signing_key_file:
        found[KEY_FILE] = str(Path(signing_key_file).expanduser().absolute())
        read_keys(Path(found[KEY_FILE]))
    else:
        Signer.configured()
    return found


def warn_of_password(option: str, url: str, better: str) -> None:
    """Warn if the URL of an option has a password, because all users of the machine can see command lines.

    `better` names a safer place for the password.
    """
    if mask(url) != url:
        say(f"Warning: {option} shows its password to all users of this machine; better in {better}", err=True)


def origin(found: Mapping[str, str]) -> str:
    """Return the name of the environment variable from which the URL of the broker comes.

    Return "" if the URL comes from an option or a file, or if there is no broker.
    """
    return next((name for name in (OWN_BROKER, BROKER) if BROKER not in found and os.environ.get(name)), "")


def refusal(error: ShadhoError) -> click.ClickException:
    """Return an exception for click, which then prints the error in one line and exits with the error's exit code."""
    shown = click.ClickException(printable(" ".join(str(error).split())))
    shown.exit_code = error.exit_code  # type: ignore[misc]  # click declares it for the class, and reads it from the instance
    return shown


@contextmanager
def refusals() -> Iterator[None]:
    """Show a ShadhoError as click shows its errors, and each warning in one line. End at Ctrl-C without a traceback.

    `group.Commands` uses it for all commands. It is also a decorator for commands that run with ``python -m``.
    """
    try:
        with readable_warnings():
            yield
    except ShadhoError as error:
        raise refusal(error) from None
    except click.ClickException as error:
        error.message = printable(error.message)  # type: ignore[misc]  # changed in place: it has click's context
        raise
    except KeyboardInterrupt:
        say("stopped", err=True)
        raise SystemExit(INTERRUPTED) from None


def _read(path: Path) -> dict[str, str]:
    found = {}
    for number, line in enumerate(map(str.strip, read_text(path, f"the URL file {path}").splitlines()), 1):
        name, separator, value = map(str.strip, line.partition("="))
        if not line or line.startswith("#"):
            continue
        if not separator or name not in DEFAULTS:
            raise UsageError(f"line {number} of {path} is neither {BROKER}=URL nor {REDIS}=URL")
        found[name] = value
    if path.stat().st_mode & 0o077 and any(mask(url) != url for url in found.values()):
        say(f"Warning: other users of this machine can read the passwords in {path}; chmod 600 {path}", err=True)
    return found


def metrics_options(command: F) -> F:
    """Add the options --metrics-port and --metrics-host to a command."""
    command = click.option(
        "--metrics-host",
        metavar="ADDRESS",
        help=f"Address on which metrics are served: {LOOPBACK} for this machine alone, 0.0.0.0 for all. Anyone who "
        f"reaches it can read them.  [default: {LOOPBACK}; env of a worker: {HOST}]",
    )(command)
    return click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        metavar="PORT",
        help=f"Serve metrics for Prometheus at /metrics on this port; 0 for a free one.  [env of a worker: {PORT}]",
    )(command)


class Value(click.ParamType):  # type: ignore[type-arg]  # it is not generic before click 8.4
    """Type of the option of a setting. Values are checked in the same way as in the STUDY of a study file."""

    def __init__(self, setting: Setting) -> None:
        self._setting = setting
        self._number = next((kind for kind in (int, float) if kind in setting.kinds), None)
        self.name = "text" if self._number is None else self._number.__name__

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        if self._number is not None:
            with suppress(ValueError):
                value = self._number(value)
        try:
            return getattr(read_settings({self._setting.name: value}), self._setting.name)
        except UsageError as error:
            raise refusal(error) from None


def study_options(command: F, *, is_change: bool = False) -> F:
    """Add to a command the options of all settings that have an option, in the order of SETTINGS.

    With `is_change`, the command changes a running study. Options of settings that cannot be changed are then hidden,
    not missing, so that the command can say why it refuses them.
    """
    for setting in [*SETTINGS.values()][::-1]:
        if setting.help:
            command = option(setting, is_change=is_change)(command)
    return command


def option(setting: Setting, *, multiple: bool = False, is_change: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds the option of a setting. Its default is None, or an empty tuple if `multiple`.

    With `is_change`, the command changes a running study. Its help then shows no default, and hides the option if the
    setting cannot be changed.
    """
    default = setting.default if setting.shown_default is None else setting.shown_default
    shown = "" if is_change or default in (None, "") else f"  [default: {default}]"
    flag = setting.flag
    is_switch = isinstance(setting.default, bool)
    form: dict[str, Any] = {"type": click.Choice([*setting.choices]) if setting.choices else Value(setting)}
    if is_switch or setting.value:
        form = {"is_flag": True} if is_switch else {"flag_value": setting.value}
    return click.option(
        *filter(None, [setting.short]),
        f"{flag}/--no-{flag.removeprefix('--')}" if is_switch else flag,
        setting.name,
        **form,
        default=None,
        multiple=multiple,
        hidden=is_change and not setting.is_changeable,
        metavar=setting.metavar,
        help=setting.help + shown,
    )


store_option = click.option(
    "--store",
    default=DEFAULT_STORE,
    envvar=STORE_VARIABLE,
    show_default=True,
    metavar="URL",
    help=f"Database that keeps the trials.  [env: {STORE_VARIABLE}]",
)
user_option = click.option("--user", metavar="NAME", help="Only the studies of this user (SHADHO_USER, or login@host).")
json_option = click.option(
    "--json", "as_json", is_flag=True, help="Print one JSON object and nothing else on standard output."
)


def _complete(context: click.Context, _: click.Parameter, incomplete: str) -> list[str]:
    """Return the names of the studies that begin with `incomplete`, for completion with the Tab key."""
    from shadho_celery.store.sql import SqlStore

    with suppress(ShadhoError):
        records = SqlStore(context.params.get("store") or DEFAULT_STORE, read_only=True).records()
        return [record.name for record in records if record.name.startswith(incomplete) and record.name.isprintable()]
    return []


study_argument = click.argument("name", metavar="STUDY", shell_complete=_complete)


@contextmanager
def opened(store: str, name: str, *, exactly: bool = False) -> Iterator[StudyResults]:
    """Open the study called `name`, or the only one whose name begins with it.

    Unless `exactly`, `name` may also be a module, which means its latest study. Standard error then names the study. At
    the end, a warning is printed if the block has read values that the store has only as texts.
    """
    # Imported here, because SQLAlchemy takes a third of a second to import.
    from shadho_celery.results.study import StudyResults
    from shadho_celery.store.sql import SqlStore

    warn_of_password("--store", store, "PGPASSWORD or ~/.pgpass")
    found = SqlStore(store, read_only=True)
    study = StudyResults(found, found.find(name, told=None if exactly else partial(say, err=True)))
    yield study
    if study.values_note:
        say(f"Warning: {study.values_note}", err=True)


@contextmanager
def new_file(output: Path, content: str = "") -> Iterator[IO[bytes]]:
    """Yield a file that replaces an existing one only when it is complete, or standard output. Raises UsageError.

    If `content` is given, standard error then says that this was written to the file.
    """
    if output == STDOUT:
        shown = io.BytesIO()
        yield shown if sys.stdout.isatty() else sys.stdout.buffer
        # Control characters must not reach a terminal.
        say(shown.getvalue().decode(), nl=False)
        return
    try:
        with replacing(output) as file:
            yield file
    except OSError as error:
        raise UsageError(f"{output} cannot be written: {error.strerror}; give -o another FILE") from None
    if content:
        say(f"{content} written to {output}", err=True)


def file_of(study: StudyResults, instead: str = "continue it there with minimize(..., resume=True)") -> str:
    """Return the name of a recorded study's file. Raises UsageError if it may name any module.

    If there is none, raises UsageError with the remedy `instead`.
    """
    module, found = study.module, study.name
    if not module:
        raise UsageError(f"study {found!r} has no study file, because a program ran it; {instead}")
    is_of_python = module.partition(".")[0] in sys.stdlib_module_names and not module.endswith(tuple(FORMS))
    if is_of_python or not re.match(MODULE_NAME, module):
        raise UsageError(
            f"study {found!r} names {short(module)} as its study file; give the file: run FILE --resume {found}"
        )
    return module


def confirm(question: str) -> None:
    """Ask the user to confirm a deletion. End the command if the answer is no. Raises UsageError without an answer."""
    try:
        if click.confirm(printable(question), err=True):
            return
    except click.Abort:
        raise UsageError("no answer, so nothing was deleted; give --yes if nobody can answer") from None
    say("nothing was deleted", err=True)
    raise SystemExit(1)


def print_json(found: Any) -> None:
    """Print one JSON value in one line."""
    from shadho_celery.results.study import plain_json

    say(printable_json(json.dumps(plain_json(found), ensure_ascii=False, allow_nan=False)))


def moment(seconds: float | None) -> str:
    """Return a time in seconds since the epoch as text in local time; "-" for None."""
    return "-" if seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds))
