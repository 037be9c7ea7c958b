"""Shows a study in MLflow: an experiment with a run of the study, and in it a nested run for each ended trial."""

from __future__ import annotations

import os
import re
from hashlib import sha256

from shadho_celery.errors import UsageError
from shadho_celery.session.tracking import EndedTrial

#: tag with the study's key; the facts of a trial are further tags with this prefix. The run of the study has WHOLE in
#: place of a trial's number
STUDY, PREFIX, WHOLE = "shadho.study", "shadho.", "all"
#: status of a run by the state of its trial; any other state is a success
STATUS = {"FAILED": "FAILED", "CANCELLED": "KILLED"}
#: variable that names the experiment; and variables that let MLflow raise an error after seconds instead of minutes
NAME, LIMITS = "MLFLOW_EXPERIMENT_NAME", {"MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1", "MLFLOW_HTTP_REQUEST_TIMEOUT": "30"}


class MlflowTracker:
    """Finds the runs of a study by their tags. A run of a trial that is not terminated was interrupted."""

    def __init__(self, study: str, key: str, uri: str) -> None:
        os.environ.update({**LIMITS, **os.environ})
        import mlflow

        mlflow.set_tracking_uri(uri or mlflow.get_tracking_uri())
        self._client, self._tags = mlflow.MlflowClient(), {STUDY: key}
        name = os.environ.get(NAME) or study
        found = self._client.get_experiment_by_name(name)
        if found and not os.environ.get(NAME) and found.tags.get(STUDY) != key:
            raise UsageError(f"MLflow has another experiment {name}; resume with {NAME} set to one for this study")
        self._experiment = found.experiment_id if found else self._client.create_experiment(name, tags=self._tags)
        runs = mlflow.search_runs([self._experiment], f"tags.`{STUDY}` = '{key}'", output_format="list")
        self._runs = {run.data.tags[f"{PREFIX}number"]: run.info for run in runs}
        self.known = [int(number) for number, run in self._runs.items() if number != WHOLE and run.status != "RUNNING"]
        if WHOLE not in self._runs:
            tags = {**self._tags, f"{PREFIX}number": WHOLE}
            self._runs[WHOLE] = self._client.create_run(self._experiment, tags=tags, run_name=study).info
        self._tags["mlflow.parentRunId"] = whole = self._runs[WHOLE].run_id
        self._client.set_terminated(whole)

    def log(self, trial: EndedTrial) -> None:
        from mlflow.entities import Metric, Param

        tags = {f"{PREFIX}{name}": fact[:5000] for name, fact in trial.facts.items()}
        tags |= {**self._tags, "mlflow.user": trial.facts.get("user", "")}
        form = {"start_time": int(1000 * trial.started_at), "run_name": f"trial {trial.number}"}
        run = self._runs.get(str(trial.number)) or self._client.create_run(self._experiment, tags=tags, **form).info
        points = [(int(1000 * at), step, numbers) for step, at, numbers in trial.points]
        metrics = [Metric(_name(k), v, at, step) for at, step, numbers in points for k, v in numbers.items()]
        params = [Param(_name(label), str(value)[:6000]) for label, value in trial.params.items()]
        # A request has at most a thousand of them, and at most a hundred params.
        for part in range(max(len(metrics), 9 * len(params)) // 900 + 1):
            of_part, of_params = slice(900 * part, 900 * part + 900), slice(100 * part, 100 * part + 100)
            self._client.log_batch(run.run_id, metrics[of_part], params[of_params])
        self._client.set_terminated(run.run_id, STATUS.get(trial.facts["state"], "FINISHED"), points[-1][0])


def _name(name: str) -> str:
    """Return the name of a metric or a param in the characters that MLflow accepts, with a digest if it differs."""
    if len(name) <= 250 and re.fullmatch(r"\w[\w\-. ]*(/\w[\w\-. ]*)*", name):
        return name
    return re.sub(r"[^\w\- ]", "_", name)[:200] + "-" + sha256(name.encode()).hexdigest()[:8]
