"""Shows a study in TensorBoard: a folder with an event file for each ended trial, with its params as hparams."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from shadho_celery.session.tracking import EndedTrial, claim
from shadho_celery.store.base import StudyRecord


class TensorboardTracker:
    """Writes each trial to a temporary folder, which gets the trial's number as its name when it is complete."""

    def __init__(self, study: StudyRecord, uri: str) -> None:
        self._folder = claim(Path(uri or "runs"), study)
        self.known = [int(each.name) for each in self._folder.iterdir() if each.name.isdecimal()]

    def log(self, trial: EndedTrial) -> None:
        from tensorboard.summary.writer.record_writer import RecordWriter

        part = self._folder / ".part"
        shutil.rmtree(part, ignore_errors=True)
        part.mkdir()
        with (part / f"events.out.tfevents.{trial.started_at:.0f}.{trial.id}").open("wb") as file:
            writer = RecordWriter(file)
            for event in _events(trial):
                writer.write(event.SerializeToString())
        part.rename(self._folder / str(trial.number))

    def close(self) -> None:
        """Do nothing: each file is complete."""


def _events(trial: EndedTrial) -> Iterator[Any]:
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary
    from tensorboard.plugins.hparams.summary_v2 import hparams_pb

    hparams = {name: trial.facts[name] for name in ("state", "compute_class") if name in trial.facts}
    yield Event(wall_time=trial.started_at, file_version="brain.Event:2")
    summary = hparams_pb({**hparams, **trial.params}, trial_id=trial.id, start_time_secs=trial.started_at)
    yield Event(wall_time=trial.started_at, summary=summary)
    last = trial.reports[-1][0] if trial.reports else 0
    for step, at, numbers in (*trial.reports, (last, trial.finished_at, trial.metrics)):
        values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
        yield Event(wall_time=at, step=step, summary=Summary(value=values))
