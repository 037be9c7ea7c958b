"""Options of a command that are made from the descriptions of the settings."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import click

from shadho_celery.cli.connection_options import F, refusal
from shadho_celery.core.settings import SETTINGS, Setting, read_settings
from shadho_celery.errors import UsageError


class Value(click.ParamType[Any]):
    """Type of an option for a setting. The value is checked like that of the same setting in STUDY."""

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


def options(command: F) -> F:
    """Add to a command the options of all settings that have one, in the order of the settings."""
    for setting in [*SETTINGS.values()][::-1]:
        if setting.help:
            command = option(setting)(command)
    return command


def changes(command: F) -> F:
    """Add to a command the options of the settings that may change in a running study.

    The other ones are hidden, so that the command can say why it refuses them.
    """
    for setting in [*SETTINGS.values()][::-1]:
        if setting.help:
            command = option(setting, is_change=True)(command)
    return command


def option(setting: Setting, *, multiple: bool = False, is_change: bool = False) -> Callable[[F], F]:
    """Return a decorator that adds the option of a setting. Its default is None, or an empty tuple if `multiple`.

    With `is_change`, it is for a running study: help shows no default, and only options of settings that may change.
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
