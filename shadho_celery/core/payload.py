"""Payload of a message to a worker, which is validated before use.

The key of the study and the numbers of trials become parts of folder names and Redis keys, and the module is imported.
So the types of the fields limit the values that a client of the broker can send.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct

from shadho_celery.core.checks import resolve
from shadho_celery.core.code import Digest
from shadho_celery.core.trial import Attempt, Name, Objectives, ReplicaSeat, TimeLimit
from shadho_celery.core.users import UserName

StudyKey = Annotated[str, Meta(pattern=r"^[A-Za-z0-9_-]{1,64}\Z")]
#: dotted name of a module; or, for a study in another form, the relative path of its file, which cannot lead out of its
#: folder
MODULE_NAME = r"^([^\W\d]\w*(\.[^\W\d]\w*)*|(\.?[\w-][\w.-]*/)*[\w-][\w.-]*\.(toml|pickle))\Z"
ModuleName = Annotated[str, Meta(pattern=MODULE_NAME, max_length=1000)]


class Payload(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A message to a worker: attempts of one study, and settings that apply to all of them."""

    study: StudyKey
    #: name of the study, which its objective and log lines use
    name: Name = ""
    #: module that defines the objective
    module: ModuleName
    #: digest of the code under which the attempts must run; "" for any code
    code: Digest = ""
    #: True if workers that accept code can get the study's code from Redis
    is_shipped: bool = False
    attempts: list[Attempt]
    #: seconds after which a trial is stopped
    timeout: TimeLimit | None = None
    #: True if failures may count against the worker, because there are other workers with which it can be compared
    watched: bool = False
    #: rank and coordinator of a replica, if the worker should run this replica for the only attempt, whose trial is
    #: distributed; None if the worker should run the attempts
    replica: ReplicaSeat | None = None
    #: True if all slots of an attempt must be on the worker that claims it
    one_worker: bool = False
    #: direction of each loss by name; None for a study with one loss that has no name
    objectives: Objectives | None = None
    #: user whose study it is, and his signature of `policy.study_text`; "" if he has no key
    owner: UserName = ""
    proof: str = ""

    def __post_init__(self) -> None:
        if self.replica is not None and len(self.attempts) != 1:
            raise ValueError("a message for a replica must have one attempt")
        if self.replica is not None and self.replica.rank < 1:
            raise ValueError("the coordinator itself is not a replica - at `$.replica.rank`")


# The type is resolved here, because each slot of a worker decodes messages in a thread of its own.
resolve(Payload)
