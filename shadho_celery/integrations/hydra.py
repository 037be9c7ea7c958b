"""Hydra's sweeper ``hydra/sweeper=shadho``: each job is a trial of a command study, which runs the user's own app.

The overrides with several values are the search space: ``opt=adam,sgd``, ``lr=tag(log, interval(1e-4, 1e-1))``, ....
The keys of ``hydra.sweeper`` are the settings of STUDY and RUN. Each Hydra app imports this module through
`hydra_plugin`, so what a sweep needs is imported only when one runs.
"""

from __future__ import annotations

import json
import logging
import math
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from itertools import islice
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep, Transformer
from hydra.core.utils import JobStatus
from hydra.experimental.callback import Callback
from hydra.plugins.sweeper import Sweeper
from omegaconf import OmegaConf

from shadho_celery.errors import ShadhoError, UsageError

log = logging.getLogger(__name__)

#: keys of ``hydra.sweeper`` beside the settings of STUDY and the arguments of `ShadhoSweeper`: arguments of `minimize`
RUN = ("store", "resume", "seed", "warm_start")
#: settings that a sweep makes itself, and budgets, which a job of Hydra would not get
_NOT_HERE = ("command", "arg", "fidelity")
#: beginnings of the words that are for the sweep alone, not for its jobs
_OF_SWEEP = ("-m", "--multi", "hydra/sweeper", "hydra.sweep", "hydra/launcher", "hydra.launcher", "hydra.mode")


class ShadhoSweeper(Sweeper):
    """Runs a sweep as a command study, on workers of this machine or of the fleet that the environment names."""

    def __init__(self, params: Any = None, workers: Any = None, study: str | None = None, **given: Any) -> None:
        """The arguments are the keys of ``hydra.sweeper``."""
        self._params, self._workers, self._study = params or {}, workers, study
        given = {"store": os.environ.get("SHADHO_STORE"), **given}
        self._given = {key: value for key, value in given.items() if value is not None}

    def setup(self, *, hydra_context: Any, task_function: Any, config: Any) -> None:
        self.hydra_context, self.config = hydra_context, config

    def sweep(self, arguments: list[str]) -> None:
        """Run the jobs, and write the best one to the folder of the sweep. Without a result, exit with code 1."""
        from shadho_celery.cli.shared_options import refusal

        try:
            found = self._search(arguments)
        except ShadhoError as error:
            (refused := refusal(error)).show()
            raise SystemExit(refused.exit_code) from None
        if found.state == "stopped":
            log.info("study %s was stopped; the same command with hydra.sweeper.resume=true continues it", found.name)
        elif found.best_or_none is None:
            raise SystemExit(1)
        if found.best_or_none is not None:
            # The form is that of Hydra's sweeper for Optuna.
            best = {"best_params": {**found.best.values}, "best_value": found.best_loss}
            front = [{"params": {**each.values}, "values": [*each.losses.values()]} for each in found.front]
            best = {"name": "shadho", "study": found.name, **({"solutions": front} if front else best)}
            (folder := Path(self.config.hydra.sweep.dir)).mkdir(parents=True, exist_ok=True)
            OmegaConf.save(OmegaConf.create(best), folder / "optimization_results.yaml")
            log.info("%s, also in %s", best, folder)

    def _search(self, arguments: list[str]) -> Any:
        """Run the study of the sweep, and return it. Raises ShadhoError."""
        from shadho_celery.cli.messages import readable_warnings
        from shadho_celery.core.checks import check_name
        from shadho_celery.core.files import SWEEPS
        from shadho_celery.core.settings import KEPT, SETTINGS
        from shadho_celery.objective.toml_study import write_study
        from shadho_celery.program.on_workers import search_on_workers

        known = [key for key in SETTINGS if key not in _NOT_HERE]
        for key in self._given:
            check_name("key of hydra.sweeper", key, ["params", "workers", "study", *RUN, *known])
        params = [f"{key}={'null' if value is None else value}" for key, value in self._params.items()]
        parser = OverridesParser.create(config_loader=self.hydra_context.config_loader)
        # An override of the command line replaces the one of `params`.
        overrides = {each.get_key_element(): each for each in parser.parse_overrides([*params, *arguments])}
        fixed = [each.input_line for each in overrides.values() if not each.is_sweep_override()]
        space = space_of(overrides.values())
        # If the app has no such key or option, Hydra says so here, and not in each job. Composing takes 60 ms.
        words = [[f"{key}={each}" for each in next(iter(form.values()))[:50]] for key, form in space.items()]
        self.validate_batch_is_legal([[*fixed, *(w[n % len(w)] for w in words)] for n in range(max(map(len, words)))])
        made = {"command": self._command(arguments, fixed), "arg": "{label}={value}", "space": space}
        run, settings = ({key: self._given[key] for key in keys if key in self._given} for keys in (RUN, KEPT))
        content = {key: value for key, value in self._given.items() if key not in {*RUN, *KEPT}}
        module = write_study("a sweep of Hydra", content | made, Path(sys.argv[0]).name, SWEEPS)
        # The study is shipped to the workers of a fleet, because they do not have this file.
        opened = {"points": (), "ship": True, "name": self._study, **run}
        with readable_warnings():
            return search_on_workers(module, None, settings, opened, workers=self._workers, broker=None, redis=None)

    def _command(self, arguments: Sequence[str], fixed: Iterable[str]) -> list[str]:
        """Return the command of a job: that of the sweep, with the values of a trial in place of the swept ones."""
        program = sys.orig_argv[: len(sys.orig_argv) - len(sys.argv) + 1]
        own = [word for word in sys.argv[1:] if word not in arguments and not word.lstrip("+").startswith(_OF_SWEEP)]
        # With this variable, the last line of an error is that of the exception.
        words = ["env", "HYDRA_FULL_ERROR=1", *(word.replace("{", "{{") for word in (*program, *own, *fixed))]
        words += ["hydra.mode=RUN", "hydra.job.num={trial}", "hydra.run.dir=${{oc.env:SHADHO_CHECKPOINT_DIR}"]
        return [*words, f"++hydra.callbacks.shadho._target_={__name__}.{JobCallback.__name__}", "{args}"]


class JobCallback(Callback):
    """Gives what the function of a job returns to its trial."""

    def on_job_end(self, config: Any, job_return: Any, **_: Any) -> None:
        from shadho_celery.objective.result import read_metrics
        from shadho_celery.objective.script import PARAMS, RESULT

        found: Any = job_return.return_value if job_return.status is JobStatus.COMPLETED else None
        is_result = isinstance(found, Mapping) and not found.keys().isdisjoint(["loss", "losses"])
        with suppress(TypeError, ValueError):
            result = dict(read_metrics(found).metrics) if is_result else float(found)
            Path(os.environ[PARAMS]).with_name(RESULT).write_text(json.dumps(result))


def space_of(overrides: Iterable[Override]) -> dict[str, dict[str, Any]]:
    """Return the short form of the domain of each override with several values, by its key.

    A key with the name of a placeholder of commands, such as ``seed``, gets the prefix ``++``, with which it has the
    same meaning for Hydra. Raises UsageError if there is no such override, and for one that is no domain.
    """
    from shadho_celery.objective.command import RESERVED

    swept = {each.get_key_element(): each for each in overrides if each.is_sweep_override()}
    if not swept:
        raise UsageError("no override has several values; give some, such as opt=adam,sgd or 'lr=interval(0.1, 0.9)'")
    return {f"++{key}" if key in RESERVED else key: _form(each) for key, each in swept.items()}


def _form(override: Override) -> dict[str, Any]:
    """Return the short form of the domain of an override. Raises UsageError."""
    from shadho_celery.space.forms import MOST_OPTIONS

    sweep, line = override.value(), override.input_line
    is_interval = isinstance(sweep, IntervalSweep)
    if others := [each for each in getattr(sweep, "tags", ()) if each != "log" or not is_interval]:
        raise UsageError(f"{line}: {others[0]} is no tag here; the one tag is log, as in tag(log, interval(1, 9))")
    if is_interval:
        law = "int" if isinstance(sweep.start, int) else "" if sweep.tags else "uniform"
        return {f"log{law}" if sweep.tags else law: [sweep.start, sweep.end]}
    # A text keeps its quotes and escapes, because it becomes a word of a command.
    options = islice(override.sweep_iterator(), MOST_OPTIONS + 1) if getattr(sweep, "step", 1) else ()
    found = [each if isinstance(each, (int, float)) else Transformer.str(each) for each in options]
    if not found:
        raise UsageError(f"{line} has no values; give some, such as a,b or range(START, STOP) with START before STOP")
    ends = [min(found), max(found)] if isinstance(sweep, RangeSweep) and 1 < len(found) <= MOST_OPTIONS else []
    if ends and all(math.isclose(end / sweep.step, round(end / sweep.step)) for end in ends):
        return {"int" if isinstance(ends[0], int) else "uniform": ends, "step": abs(sweep.step)}
    return {"choice": found}
