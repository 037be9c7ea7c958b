"""Families of metrics, and the collector that reads their samples when Prometheus asks for them."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, dataclass
from enum import Enum
from typing import TYPE_CHECKING, Generic, TypeVar

from shadho_celery.core.checks import one_line

if TYPE_CHECKING:
    from prometheus_client import Metric

T = TypeVar("T")

#: value of a sample; for a summary, the count and the sum
Number = float | tuple[float, float]
#: values of a family's labels -> the sample
Samples = Mapping[tuple[str, ...], Number]

#: maximum number of samples of a family; further samples, in the order of their labels, are left out
MOST = 1000

#: maximum number of characters of a label's value
MOST_CHARACTERS = 255

#: maximum number of times that a family is read if its data change during the reading
TRIES = 10


class Kind(Enum):
    """Prometheus's type of a family, with the suffixes of its samples' names."""

    GAUGE = ("",)
    #: a number that only grows while the process lives
    COUNTER = ("_total",)
    #: the count and the sum of measurements
    SUMMARY = ("_count", "_sum")


@dataclass(frozen=True)
class Family(Generic[T]):
    """A family of metrics that is read from a T, such as a run."""

    #: name without the suffix ``_total`` of a counter
    name: str
    help: str
    _: KW_ONLY
    #: function that returns the samples; any thread may call it
    read: Callable[[T], Samples]
    labels: Sequence[str] = ()
    kind: Kind = Kind.GAUGE

    @property
    def names(self) -> Sequence[str]:
        """Names of the family's samples, as Prometheus shows them."""
        return [self.name + suffix for suffix in self.kind.value]


class Collector(Generic[T]):
    """Collector for prometheus_client: reads families from one T at each scrape."""

    def __init__(self, families: Iterable[Family[T]], of: T, labels: Mapping[str, str]) -> None:
        """`labels` are added to each sample, such as the name of the study."""
        self._families, self._of = [*families], of
        self._names, self._values = [*labels], tuple(labels.values())

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics with their current samples."""
        from prometheus_client import Metric

        for family in self._families:
            metric = Metric(family.name, family.help, family.kind.name.lower())
            for labels, number in self._samples(family).items():
                named = dict(zip([*self._names, *family.labels], labels, strict=True))
                for name, each in zip(family.names, number if isinstance(number, tuple) else (number,), strict=True):
                    metric.add_sample(name, named, each)
            yield metric

    def _samples(self, family: Family[T]) -> Samples:
        """Return the samples of a family, with printable labels."""
        found = {
            tuple(one_line(each, MOST_CHARACTERS) for each in (*self._values, *labels)): number
            for labels, number in sorted(_read(family, self._of).items())[:MOST]
        }
        return {labels: number for labels, number in found.items() if number != math.inf}


def _read(family: Family[T], of: T) -> Samples:
    """Return the samples of a family. If another thread changes a dictionary meanwhile (RuntimeError), read again."""
    for _ in range(TRIES):
        try:
            return family.read(of)
        except RuntimeError:
            continue
    return {}
