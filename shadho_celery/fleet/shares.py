"""Shares of a class's slots between the studies of a fleet: whole slots by weight, the rest by turns.

Of a single slot, studies of weights 4 and 1 have shares of 0.8 and 0.2. Each may fill the next whole number of slots,
one in this case, as long as it is not ahead of the others. This is start-time fair queueing (Goyal, Vin and Cheng,
SIGCOMM 1996) without a central queue: in each class a study has a virtual time, which advances by its slot seconds over
its weight, and which it announces. One that is ahead of another by more than a leeway waits. One that begins to want
slots starts from the lowest virtual time of the others: it does not catch up on the past, and it keeps its debts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadho_celery.core.hardware import ComputeClass
from shadho_celery.fleet.in_flight import Sent
from shadho_celery.transport.registry import MAX_VIRTUAL

#: slot seconds that a study may be ahead of another before it waits. The other learns from announcements that it may
#: take more; they are up to three seconds old, and no slot should be idle until then
LEEWAY_SECONDS = 3.0

#: slot seconds from which a study is about to wait: others take over its slots, as it may wait by now
NEARLY_SECONDS = 1.0

#: seconds that a message costs a worker: no attempt takes less of its slot
MESSAGE_SECONDS = 0.001

#: parts of a slot that are rounding errors of a share
ROUNDING = 1e-9


@dataclass
class _Turn:
    """State of a study's turns in one class."""

    #: slot seconds of the attempts that have ended
    ended: float = 0.0
    #: virtual time at which no slot second was used
    origin: float = 0.0
    #: True if the study wanted more slots than it had, as of the last look
    is_wanting: bool = False
    #: pairs of weight and virtual time of the others that wanted more slots then
    others: Sequence[tuple[float, float]] = ()
    #: parts of a slot that the shares have beyond whole ones: this study's, then those of the others
    parts: Sequence[float] = (0.0,)
    #: slot seconds ahead of the one furthest behind then; None unless it waited, with whole slots of its own
    lead: float | None = None


class Turns:
    """Turns of one study in each class."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._turns: dict[str, _Turn] = defaultdict(_Turn)

    def end(self, sent: Sent, now: float, seconds: float | None = None) -> None:
        """Record the slot seconds of an attempt that has ended; `seconds` is what its worker has measured."""
        used = sent.slot_seconds(now) if seconds is None else seconds * sent.attempt.slots
        self._turns[str(sent.attempt.compute_class)].ended += max(used, MESSAGE_SECONDS)

    def look(
        self,
        known: ComputeClass,
        others: Sequence[tuple[float, float]],
        sent: Sequence[Sent],
        now: float,
        *,
        is_wanting: bool,
    ) -> float:
        """Update the turns in a class, and return the study's virtual time there.

        `others` are pairs of weight and virtual time of the other studies that want more slots, and `sent` are this
        study's attempts in flight.
        """
        turn = self._turns[known.name]
        had_others, turn.others = bool(turn.others), others
        turn.parts = parts(known.slots, known.share, [weight / self._weight for weight, _ in others])
        used = sum(each.slot_seconds(now) for each in sent)
        if others and not turn.is_wanting:
            turn.origin -= min(0.0, self._lead(turn, used)) / self._weight
        if others and not had_others:
            # They start from now: what it has used alone is no debt.
            turn.origin -= max(0.0, self._lead(turn, used)) / self._weight
        running = sum(each.attempt.slots for each in sent if each.is_claimed)
        has_own = 0 < math.floor(known.share) >= running
        if turn.lead is not None and has_own:
            # It waits, and what it uses is its own. Otherwise the seconds that the others lose between their trials
            # would add up to a debt for as long as all run.
            turn.origin -= max(0.0, self._lead(turn, used) - turn.lead) / self._weight
        lead = self._lead(turn, used)
        turn.lead = lead if has_own and lead > LEEWAY_SECONDS else None
        turn.is_wanting = is_wanting
        return self._virtual(turn, used)

    def extras(self, sent: Iterable[Sent], now: float) -> dict[str, int]:
        """Return the slots beyond its whole ones that the study may take now, by class.

        Without the classes where it may take what rounds its share up.
        """
        shared = {name: turn for name, turn in self._turns.items() if turn.others}
        used: dict[str, float] = defaultdict(float)
        for each in sent if shared else ():
            used[str(each.attempt.compute_class)] += each.slot_seconds(now)
        extras = {name: self._extra(turn, used[name]) for name, turn in shared.items()}
        return {name: extra for name, extra in extras.items() if extra is not None}

    def _extra(self, turn: _Turn, used: float) -> int | None:
        if self._lead(turn, used) > LEEWAY_SECONDS:
            return 0
        last = min(self._virtual(turn, used), *(virtual for _, virtual in turn.others))
        beside = [
            part
            for (weight, virtual), part in zip(turn.others, turn.parts[1:], strict=True)
            if weight * (virtual - last) <= NEARLY_SECONDS
        ]
        if len(beside) == len(turn.others):
            return None
        # The slots that those ahead leave to it and to those beside it. One that is alone may also fill the gaps
        # between the trials of the others.
        left = math.ceil(sum(turn.parts) - ROUNDING) - sum(part > 0 for part in beside)
        return max(left, 0 if beside else 1) or None

    def _virtual(self, turn: _Turn, used: float) -> float:
        """Return the virtual time, with so many slot seconds `used` by the attempts in flight."""
        return min(MAX_VIRTUAL, max(0.0, turn.origin + (turn.ended + used) / self._weight))

    def _lead(self, turn: _Turn, used: float) -> float:
        """Return the slot seconds ahead of the study that is furthest behind; below 0 if that is this one."""
        last = min((virtual for _, virtual in turn.others), default=math.inf)
        return self._weight * (self._virtual(turn, used) - last)


def parts(slots: int, share: float, others: Sequence[float]) -> list[float]:
    """Return the part of a slot that each share has beyond whole ones, this study's first.

    `others` are the shares of the other studies that want more slots, as multiples of this study's `share`.
    """
    return [share % 1, *(whole(min(slots, share * other)) % 1 for other in others)]


def allow(slots: int, weight: float, others: Sequence[tuple[float, float]]) -> float:
    """Return the slots that a study of `weight` may fill beside `others`, pairs of weight and slots wanted.

    Slots go by weight; the part of its slots that a study does not want goes to the others (water filling).
    """
    free, total = float(slots), weight + sum(other for other, _ in others)
    # Studies that want least for their weight are served first, in full, as long as their part covers it.
    for other, want in sorted(others, key=lambda pair: pair[1] / pair[0]):
        part = min(want, free * other / total)
        free -= part
        total -= other
    return whole(free)


def whole(slots: float) -> float:
    """Return a number of slots without its rounding error, if it is a whole number but for that."""
    nearest = float(round(slots))
    return nearest if nearest and abs(slots - nearest) < ROUNDING else slots
