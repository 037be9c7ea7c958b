"""Shows a study in Weights & Biases: a group of runs, one for each ended trial, on its server or as offline files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from shadho_celery.errors import UsageError
from shadho_celery.session.tracking import EndedTrial, claim
from shadho_celery.store.base import StudyRecord


class WandbTracker:
    """Writes runs whose ids are those of the trials.

    An offline run is written to a temporary folder, and moved when it is complete, because a second run with the same
    id would be another folder.
    """

    def __init__(self, study: StudyRecord, uri: str) -> None:
        import wandb

        self._study, self._wandb, (entity, _, project) = study, wandb, uri.rpartition("/")
        project = project or os.environ.get("WANDB_PROJECT") or "shadho"
        quiet = dict.fromkeys(("silent", "disable_git", "x_disable_stats", "x_disable_meta"), True)
        self._form: dict[str, Any] = {"entity": entity or None, "project": project, "group": study.name}
        self._form |= {"settings": {"console": "off", "save_code": False, **quiet}, "reinit": "create_new"}
        self._offline: Path | None = None
        if wandb.setup().settings.mode == "offline":
            self._offline = Path(os.environ.get("WANDB_DIR", "."), "wandb")
            self._form["dir"] = str(claim(self._offline, study))
            ids = [each.name for each in self._offline.glob(f"offline-run-*-{study.key}-*")]
        else:
            ids = self._online()
        self.known = [int(each.rpartition("-")[2]) for each in ids]

    def _online(self) -> list[str]:
        """Return the ids of the complete runs on the server. Raises UsageError without a login."""
        try:
            api = self._wandb.Api(timeout=30)
            path = "/".join(filter(None, (self._form["entity"], self._form["project"])))
            runs = [*api.runs(path, filters={"group": self._study.name}, per_page=500)]
        except self._wandb.errors.UsageError as error:
            raise UsageError(f"W&B: {error}; or set WANDB_MODE=offline") from None
        except ValueError:
            # The server has no such project yet.
            return []
        if any(not run.id.startswith(f"{self._study.key}-") for run in runs):
            raise UsageError(f"W&B has another group {self._study.name}; name another project, as wandb:PROJECT")
        return [run.id for run in runs if run.state in ("finished", "failed")]

    def log(self, trial: EndedTrial) -> None:
        if self._offline is not None:
            shutil.rmtree(part := Path(self._form["dir"], "wandb"), ignore_errors=True)
        tags = [trial.facts[name] for name in ("state", "compute_class") if name in trial.facts]
        about: dict[str, Any] = {"id": trial.id, "config": {**trial.params}, "tags": tags}
        run = self._wandb.init(**self._form, name=f"trial {trial.number}", resume="allow", **about)
        for step, at, losses in trial.reports:
            run.log({**losses, "_timestamp": at}, step=step, commit=True)
        run.summary.update({**trial.metrics, **trial.facts})
        run.finish(exit_code=int(trial.facts["state"] not in ("COMPLETE", "PRUNED")))
        if self._offline is not None:
            # Only now the service has written all of the file.
            self._wandb.teardown()
            [found] = part.glob("offline-run-*")
            found.rename(self._offline / found.name)

    def close(self) -> None:
        """Do nothing: each run is finished."""
