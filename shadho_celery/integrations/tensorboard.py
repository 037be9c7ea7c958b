"""Shows a study in TensorBoard: a folder with an event file for each ended trial, with its params as hparams."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from shadho_celery.session.tracking import EndedTrial, claim


class TensorboardTracker:
    """Writes each trial to a file that is moved, once it is complete, to a folder named as the trial's number."""

    def __init__(self, study: str, key: str, uri: str) -> None:
        self._part = claim(Path(uri or "runs"), study, key)
        self.known = {int(each.name.rpartition("-")[2]) for each in self._part.parent.glob(f"*/events.*.{key}-*")}

    def log(self, trial: EndedTrial) -> None:
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.plugins.hparams.summary_v2 import hparams_pb
        from tensorboard.summary.writer.record_writer import RecordWriter

        began, hparams = trial.started_at, {name: trial.facts.get(name, "") for name in ("state", "compute_class")}
        summary: Any = hparams_pb({**hparams, **trial.params}, trial_id=trial.id, start_time_secs=began)
        events = [Event(wall_time=began, file_version="brain.Event:2"), Event(wall_time=began, summary=summary)]
        for step, at, numbers in trial.points:
            values = [Summary.Value(tag=name, simple_value=number) for name, number in numbers.items()]
            events.append(Event(wall_time=at, step=step, summary=Summary(value=values)))
        part, folder = self._part / "part", self._part.parent / str(trial.number)
        with part.open("wb") as file:
            writer = RecordWriter(file)
            for event in events:
                writer.write(event.SerializeToString())
        folder.mkdir(exist_ok=True)
        part.rename(folder / f"events.out.tfevents.{began:.0f}.{trial.id}")
