"""Shows a study in MLflow: an experiment with a run of the study, and in it a nested run for each ended trial."""

from __future__ import annotations

import os
import re
from hashlib import sha256
from posixpath import normpath
from typing import Any

from shadho_celery.errors import UsageError
from shadho_celery.session.tracking import EndedTrial
from shadho_celery.store.base import StudyRecord

#: tags with the study's key, and with the number of a trial, or WHOLE for the run of the study
STUDY, TRIAL, WHOLE = "shadho.study", "shadho.trial", "all"
#: status of a run by the state of its trial; any other state is a success
STATUS = {"FAILED": "FAILED", "CANCELLED": "KILLED"}
#: variable that names the experiment; and variables that let MLflow raise an error after seconds instead of minutes
NAME, LIMITS = "MLFLOW_EXPERIMENT_NAME", {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class MlflowTracker:
    """Finds the runs of a study by their tags. A run of a trial that is not terminated was interrupted."""

    def __init__(self, study: StudyRecord, uri: str) -> None:
        os.environ.update({**LIMITS, **os.environ})
        from mlflow import MlflowClient

        self._client = client = MlflowClient(uri or None)
        self._study, name = study, os.environ.get(NAME) or study.name
        found = client.get_experiment_by_name(name)
        if found and not os.environ.get(NAME) and found.tags.get(STUDY) != study.key:
            raise UsageError(f"MLflow has another experiment {name}; set {NAME} to one for this study, and --resume")
        self._experiment = found.experiment_id if found else client.create_experiment(name, tags={STUDY: study.key})
        runs, page, which = dict[str, Any](), None, f"tags.`{STUDY}` = '{study.key}'"
        while page is None or page.token:
            page = client.search_runs([self._experiment], which, max_results=1000, page_token=page and page.token)
            runs |= {run.data.tags[TRIAL]: run.info for run in page}
        self._begun = {number: run.run_id for number, run in runs.items() if run.status == "RUNNING" or number == WHOLE}
        self.known = [int(number) for number in runs if number not in self._begun]
        if WHOLE not in runs:
            self._begun[WHOLE] = self._create(WHOLE, study.name, study.created_at, {})
        client.update_run(self._begun[WHOLE], "RUNNING")

    def log(self, trial: EndedTrial) -> None:
        from mlflow.entities import Metric, Param

        number, tags = str(trial.number), {f"shadho.{name}": fact[:5000] for name, fact in trial.facts.items()}
        tags |= {"mlflow.parentRunId": self._begun[WHOLE], "mlflow.user": trial.facts.get("user", "")}
        run = self._begun.get(number) or self._create(number, f"trial {number}", trial.started_at, tags)
        last = trial.reports[-1][0] if trial.reports else 0
        steps = (*trial.reports, (last, trial.finished_at, trial.metrics))
        metrics = [Metric(_name(k), v, int(1000 * at), step) for step, at, found in steps for k, v in found.items()]
        params = [Param(_name(label), str(value)[:6000]) for label, value in trial.params.items()]
        # A request has at most a thousand of them, and at most a hundred params.
        for part in range(max(len(metrics), 9 * len(params)) // 900 + 1):
            of_part, of_params = slice(900 * part, 900 * part + 900), slice(100 * part, 100 * part + 100)
            self._client.log_batch(run, metrics[of_part], params[of_params])
        self._client.set_terminated(run, STATUS.get(trial.facts["state"], "FINISHED"), int(1000 * trial.finished_at))

    def close(self) -> None:
        self._client.set_terminated(self._begun[WHOLE])

    def _create(self, number: str, name: str, at: float, tags: dict[str, str]) -> str:
        tags = {**tags, STUDY: self._study.key, TRIAL: number}
        run = self._client.create_run(self._experiment, start_time=int(1000 * at), tags=tags, run_name=name)
        return str(run.info.run_id)


def _name(name: str) -> str:
    """Return the name of a metric or a param in the characters that MLflow accepts, with a digest if it differs."""
    if normpath(name) == name and re.fullmatch(r"(?![./])[\w\-. /]{1,250}", name):
        return name
    return re.sub(r"[^\w\- ]", "_", name)[:200] + "-" + sha256(name.encode()).hexdigest()[:8]
