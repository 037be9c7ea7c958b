"""Payload of a message to a worker, validated before use.

The study's key and the trial's number become names of folders and of Redis keys, and the module is imported. The types
of these fields therefore limit what a client of the broker can choose.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shadho_celery.core.checks import resolve
from shadho_celery.core.code import Digest
from shadho_celery.core.trial import Attempt, Name, Objectives, ReplicaSeat, TimeLimit

StudyKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
#: dotted name of a module, or relative path of the file of a study in another form, which cannot lead out of its folder
MODULE_NAME = r"^([^\W\d]\w*(\.[^\W\d]\w*)*|(\.?[\w-][\w.-]*/)*[\w-][\w.-]*\.(toml|pickle))\Z"
ModuleName = Annotated[str, Meta(pattern=MODULE_NAME, max_length=1000)]


class Payload(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One message to a worker: attempts of one study, and the settings that apply to all of them."""

    study: StudyKey
    #: name of the study, for its objective and for people
    name: Name = ""
    #: module that defines the objective
    module: ModuleName
    #: digest of the code that the attempts need; "" for any code
    code: Digest = ""
    #: True if workers that accept code get the study's code from Redis
    is_shipped: bool = False
    attempts: list[Attempt]
    #: seconds after which a trial is stopped
    timeout: TimeLimit | None = None
    #: True if a failure may count against the worker, because there are other workers to compare it with
    watched: bool = False
    #: seat of a replica that the worker is to run in the gang of the only attempt; None if it is to run the attempts
    replica: ReplicaSeat | None = None
    #: True if all slots of an attempt are those of the worker that claims it
    one_worker: bool = False
    #: direction of each loss of the study, by name; None for one loss without a name
    objectives: Objectives | None = None

    def __post_init__(self) -> None:
        if self.replica is not None and len(self.attempts) != 1:
            raise ValueError("a message for a replica must have one attempt")
        if self.replica is not None and self.replica.rank < 1:
            raise ValueError("the coordinator itself is not a replica - at `$.replica.rank`")


# Each of a worker's slots decodes messages in its own thread.
resolve(Payload)
