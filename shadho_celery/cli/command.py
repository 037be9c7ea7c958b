"""Base class of commands with many options."""

from __future__ import annotations

import click

from shadho_celery.core.names import elsewhere
from shadho_celery.core.settings import SETTINGS
from shadho_celery.core.units import seconds_of


class Duration(click.ParamType):  # type: ignore[type-arg]  # it is not generic before click 8.4
    """A duration such as ``90s`` or ``4h``, in seconds."""

    name = "duration"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> float:
        try:
            return seconds_of(str(value))
        except ValueError as error:
            self.fail(str(error), param, ctx)


class Command(click.Command):
    """A command that refuses an option that is given twice; click would silently use the last value."""

    def __init__(self, *args: object, **kwargs: object) -> None:
        super().__init__(*args, **kwargs)  # type: ignore[arg-type]
        self.context_settings.setdefault("help_option_names", ["-h", "--help"])

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        try:
            _, _, given = self.make_parser(ctx).parse_args(args=[*args])
        except click.NoSuchOption as error:
            names = {name: each.flag for name, each in SETTINGS.items()}
            names |= {flag.lstrip("-").replace("-", "_"): flag for each in self.params for flag in each.opts}
            if here := elsewhere(error.option_name.lstrip("-"), names):
                hint = f"here it is {names.get(here, here)}"
                raise click.UsageError(f"No such option {error.option_name}; {hint}", ctx) from None
            raise
        for place, parameter in enumerate(given):
            is_flag = getattr(parameter, "is_flag", False) and not parameter.secondary_opts
            is_once = isinstance(parameter, click.Option) and not parameter.multiple and not is_flag
            if is_once and parameter in given[:place]:
                raise click.UsageError(f"{max(parameter.opts, key=len)} is given twice; give it once", ctx)
        return super().parse_args(ctx, args)
