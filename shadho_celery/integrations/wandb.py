"""Shows a study in Weights & Biases: a group of runs, one for each ended trial, on its server or as offline files."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any

from shadho_celery.errors import UsageError
from shadho_celery.session.tracking import EndedTrial, claim


class WandbTracker:
    """Writes runs whose ids are those of the trials.

    An offline run is written to a temporary folder, and moved when it is complete, because a second run with the same
    id would be another folder.
    """

    def __init__(self, study: str, key: str, uri: str) -> None:
        import wandb

        self._wandb, (entity, _, project) = wandb, uri.rpartition("/")
        project = project or os.environ.get("WANDB_PROJECT") or "shadho"
        quiet = {"console": "off", "silent": True, "disable_git": True, "x_disable_stats": True, "x_disable_meta": True}
        root = Path(os.environ.get("WANDB_DIR", "."), "wandb")
        #: folder of an unfinished run; None online
        self._part = claim(root, study, key) if wandb.setup().settings.mode == "offline" else None
        self._form: dict[str, Any] = {"entity": entity or None, "project": project, "group": study, "dir": self._part}
        self._form |= {"settings": quiet, "reinit": "create_new", "resume": "allow"}
        if self._part is not None:
            ids = [each.name for each in root.glob(f"offline-run-*-{key}-*")]
        else:
            try:
                path = f"{entity}/{project}".strip("/")
                runs = [*wandb.Api(timeout=30).runs(path, filters={"group": study}, per_page=500)]
            except ValueError:
                # The server has no such project yet.
                runs = []
            if any(not run.id.startswith(f"{key}-") for run in runs):
                raise UsageError(f"W&B has another group {study}; name another project, as wandb:PROJECT")
            ids = [run.id for run in runs if run.state in ("finished", "failed")]
        self.known = {int(each.rpartition("-")[2]) for each in ids}

    def log(self, trial: EndedTrial) -> None:
        if self._part is not None:
            shutil.rmtree(self._part / "wandb", ignore_errors=True)
        form = {**self._form, "id": trial.id, "name": f"trial {trial.number}"}
        run = self._wandb.init(**form, config={**trial.params})
        *reports, (_, _, metrics) = trial.points
        for step, at, losses in reports:
            run.log({**losses, "_timestamp": at}, step=step, commit=True)
        run.summary.update({**trial.facts, **metrics})
        run.finish(exit_code=int(trial.facts["state"] not in ("COMPLETE", "PRUNED")))
        if self._part is not None:
            # Only now the service has written all of the file.
            self._wandb.teardown()
            [found] = self._part.glob("wandb/offline-run-*")
            found.rename(self._part.parents[1] / found.name)
