"""A fleet whose workers are started on demand: the slots that its studies want, its live workers, and their end."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence

from shadho_celery.control.control import why_not
from shadho_celery.control.reach import requester
from shadho_celery.core.checks import one_line
from shadho_celery.transport import urls
from shadho_celery.transport.drains import Drains
from shadho_celery.transport.redis import connect, refusals
from shadho_celery.transport.registry import Registry, StudyWants, Worker
from shadho_celery.transport.signing import Signer
from shadho_celery.transport.starts import StartRecords, Starts


class ScaledFleet:
    """The fleet that the environment names. Its methods raise ServiceError if Redis does not answer.

    With a signing key, announcements without its signature are ignored.
    """

    def __init__(self, warn: Callable[[str], None]) -> None:
        """`warn` shows a line to the user. Each is shown once."""
        client, self._signer = connect(urls.url(urls.REDIS)), Signer.configured()
        self._studies = Registry(client, StudyWants, self._signer)
        self._workers = Registry(client, Worker, self._signer)
        self._drains, self._by = Drains(client, self._signer), requester()
        self._client, self._records = client, StartRecords(client, self._signer)
        #: records of the workers that start, by class, as Redis has them
        self._kept: dict[str, Starts] = {}
        self._live: Mapping[str, Worker] = {}
        #: live workers that were asked to end
        self._ending: set[str] = set()
        self._warn, self._warned = warn, set[str]()

    def time(self) -> float:
        """Return the seconds since the epoch, by the server's clock."""
        with refusals():
            seconds, micros = self._client.time()
        return float(seconds) + float(micros) / 1e6

    def recall(self, names: Collection[str]) -> Mapping[str, Starts]:
        """Return what an earlier scaler of these classes has kept."""
        with refusals():
            found = {name: self._records.latest(name) for name in names}
        self._kept = {name: record for name, record in found.items() if record is not None}
        return {**self._kept}

    def keep(self, starting: Mapping[str, Starts], seconds: Mapping[str, float]) -> None:
        """Record the workers of each class that start, and its pause, in place of what was kept.

        They are kept for so many `seconds` by class.
        """
        with refusals():
            for name in [*self._kept]:
                if name not in starting:
                    self._records.remove(name)
                    del self._kept[name]
            for name, record in starting.items():
                if self._kept.get(name) != record:
                    self._records.put(name, record, seconds[name])
                    self._kept[name] = record

    def look(self) -> tuple[Mapping[str, int], Mapping[str, int], Mapping[str, Worker]]:
        """Return the slots by class for which the studies want workers started, those for which they want workers kept
        (`StudyWants.backlog`), and the live workers by name.
        """
        wanted, backlog = Counter[str](), Counter[str]()
        with refusals():
            studies, self._live = self._studies.living(), self._workers.living()
            gone = self._ending - self._live.keys()
            self._drains.forget(gone)
        self._ending -= gone
        for study in studies.values():
            wanted.update(study.wanted_slots)
            backlog.update(study.backlog)
        if self._studies.refused or self._workers.refused:
            self.warn("announcements that are malformed or not signed with this command's key are ignored")
        return wanted, backlog, self._live

    def has_left(self, name: str) -> bool:
        """Return whether a worker has withdrawn in order."""
        with refusals():
            return self._workers.has_left(name)

    def may_end(self, name: str) -> bool:
        """Return whether a worker obeys a request to end. If not, warn."""
        reason = why_not(f"worker {one_line(name)}", self._live[name].control, self._signer)
        if reason is not None:
            self.warn(f"{reason}; until then it is not ended")
        return reason is None

    def end(self, names: Sequence[str]) -> None:
        """Ask workers to finish their trials, to take no more, and to end."""
        with refusals():
            for name in names:
                self._drains.end(name, self._by)
        self._ending.update(names)

    def warn(self, text: str) -> None:
        """Show a warning, unless it was shown before."""
        if text not in self._warned:
            self._warned.add(text)
            self._warn(text)
