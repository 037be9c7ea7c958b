"""Class specs: compute classes whose workers are started on demand, as a file describes them."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Annotated, TypeVar

from msgspec import Meta, Struct

from shadho_celery.core.checks import as_record, plain, short
from shadho_celery.core.files import read_toml
from shadho_celery.core.hardware import check_class_name
from shadho_celery.core.trial import Price

#: maximum number of classes of a file, and of the workers and slots that a class may have
MAX_CLASSES, MAX_WORKERS = 100, 10_000

_FORM = "write [classes.gpu_large] above slots = 1, max_workers = 4, startup_seconds = 120 and the like"

F = TypeVar("F", bound="ClassFacts")
_Count = Annotated[int, Meta(ge=1, le=MAX_WORKERS)]


#: seconds that a worker may take to come, besides twice the start-up seconds of its class
_COME_SECONDS = 60.0


class ClassFacts(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Facts about the workers of a compute class, which need not be live."""

    #: slots of one worker
    slots: _Count = 1
    #: RAM of one worker; 0 if it is not known
    memory_gib: Annotated[float, Meta(ge=0, le=1e6)] = 0.0
    #: money that a slot costs an hour; None if it is not known
    price: Price | None = None
    #: seconds from the start of a worker until it takes trials
    startup_seconds: Annotated[float, Meta(ge=0, le=86_400)] = 0.0


class ClassSpec(ClassFacts, frozen=True, kw_only=True):
    """A compute class that need not have a live worker."""

    #: number of workers that it may have at a time
    max_workers: _Count = MAX_WORKERS

    @property
    def most(self) -> int:
        """Number of slots that the class may have at a time."""
        return min(self.max_workers, MAX_WORKERS // self.slots) * self.slots

    @property
    def come_seconds(self) -> float:
        """Seconds after which a worker that was started counts as one that does not come."""
        return 2 * self.startup_seconds + _COME_SECONDS


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of the file, before its tables are checked."""

    classes: Annotated[dict[str, object], Meta(min_length=1, max_length=MAX_CLASSES)]


def read_class_spec(path: Path) -> dict[str, ClassSpec]:
    """Return the classes that a TOML file describes, in its order. Raises UsageError with file, key and remedy."""
    return read_classes(path, ClassSpec)


def read_classes(path: Path, kind: type[F]) -> dict[str, F]:
    """Return the same as records of another kind."""
    return read_toml(path, f"the class spec {path}", lambda content: parse(content, kind))


def parse(content: Mapping[str, object], kind: type[F], form: str = _FORM) -> dict[str, F]:
    """Return the classes that the content of a file describes. Raises UsageError with the key of an invalid value."""
    found = {}
    for name, table in as_record(plain(content), _File, form=form).classes.items():
        check_class_name(name, "classes")
        found[name] = as_record(table, kind, f"classes.{short(name, 60)[1:-1]}", form)
    return found
