"""The console command, as a group of all commands. The module of a command is imported when the command is called."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import import_module

import click

from shadho_celery.cli.shared_options import refusals
from shadho_celery.core.checks import guess
from shadho_celery.core.records import ACTIONS

#: by command name: its module, the name of the click command there, and its line in `--help` (which imports no command)
COMMANDS: Mapping[str, tuple[str, str, str]] = {
    "run": ("shadho_celery.launch", "main", "Run a study, here or on a fleet."),
    "resume": ("shadho_celery.launch", "resume", "Continue a study by its name."),
    "worker": ("shadho_celery.worker", "main", "Serve trials on this machine."),
    "slurm": ("shadho_celery.cli.slurm", "slurm", "Print or submit a SLURM job of workers."),
    "fleet": ("shadho_celery.cli.fleet", "fleet", "Run the server of a small fleet; set a fleet's users."),
    "scale": ("shadho_celery.cli.scale", "scale", "Start and end workers as studies want them."),
    "simulate": ("shadho_celery.simulate", "main", "Simulate a search on a described cluster."),
    "studies": ("shadho_celery.cli.results", "studies", "List the studies of a store."),
    "show": ("shadho_celery.cli.results", "show", "Show a study, also while it runs."),
    "trials": ("shadho_celery.cli.results", "trials", "List a study's trials."),
    "trial": ("shadho_celery.cli.results", "trial", "Show all that is known of one trial."),
    "logs": ("shadho_celery.cli.logs", "logs", "Print the output of a trial."),
    "again": ("shadho_celery.cli.again", "again", "Run a trial's values again, here, without a record."),
    "fetch": ("shadho_celery.cli.logs", "fetch", "Copy what a trial has left in its checkpoint_dir."),
    "best": ("shadho_celery.cli.results", "best", "Print the best values."),
    "export": ("shadho_celery.cli.results", "export", "Write a study's trials as csv, json or parquet."),
    "report": ("shadho_celery.cli.results", "report", "Write a study's report with charts as one HTML file."),
    "rm": ("shadho_celery.cli.results", "rm", "Delete a study with its files."),
    **{name: ("shadho_celery.cli.control", name, kind.line) for name, kind in ACTIONS.items()},
    "dashboard": ("shadho_celery.dashboard.command", "dashboard", "Show studies and machines on a web page."),
    "doctor": ("shadho_celery.cli.doctor", "doctor", "Check servers, store, clocks, workers, queues and disks."),
    "exporter": ("shadho_celery.cli.exporter", "exporter", "Serve metrics of a whole fleet for Prometheus."),
    "status": ("shadho_celery.cli.status", "status", "Show what runs: studies, workers, queues."),
}

EPILOG = """
\b
Examples:
  shadho-celery run tasks.svm --trials 40
  shadho-celery studies
  shadho-celery show svm
  shadho-celery best svm --json
  shadho-celery COMMAND --help

\b
A study's name may be shortened as long as one study begins so.

\b
Completion of commands and options by the Tab key:
  bash: eval "$(_SHADHO_CELERY_COMPLETE=bash_source shadho-celery)"       # in ~/.bashrc
  zsh:  eval "$(_SHADHO_CELERY_COMPLETE=zsh_source shadho-celery)"        # in ~/.zshrc
  fish: _SHADHO_CELERY_COMPLETE=fish_source shadho-celery | source        # in ~/.config/fish/config.fish
"""


class Commands(click.Group):
    """Group of the commands in `COMMANDS`. It imports a command when click looks it up."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return [*COMMANDS]

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        place, attribute, _ = COMMANDS[cmd_name]
        module = import_module(place)
        kind = ACTIONS.get(cmd_name)
        found: click.Command = getattr(module, attribute) if kind is None else module.command(kind)
        return found

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and args[0] not in COMMANDS and (hint := guess(args[0], COMMANDS)):
            ctx.fail(f"No such command {args[0]!r}; {hint.rstrip('; ')}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, _, text) in COMMANDS.items()])

    def invoke(self, ctx: click.Context) -> object:
        # `refusals` is used here, not in each command, because Ctrl-C may arrive while a command's module is imported.
        with refusals():
            return super().invoke(ctx)


@click.command(cls=Commands, epilog=EPILOG, context_settings={"help_option_names": ["-h", "--help"]})
@click.version_option(package_name="shadho_celery", prog_name="shadho-celery")
def commands() -> None:
    """Hardware-aware distributed hyperparameter search on Celery."""
