"""Shares of a class's slots between the studies of a fleet: whole slots by weight, the rest by turns.

For a single slot, studies of weights 4 and 1 have shares of 0.8 and 0.2. Each may use the next whole number of slots
(here one) as long as it is not ahead of the others. This is start-time fair queueing (Goyal, Vin and Cheng, SIGCOMM
1996) without a central queue. In each class a study has a virtual time, which advances by its slot seconds divided by
its weight, and which it announces. A study that is ahead of another one by more than a leeway waits. A study that
starts to want slots starts from the lowest virtual time of the others: it does not catch up on the past, but it keeps
its debts.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from shadho_celery.core.attempts import Sent
from shadho_celery.core.hardware import ComputeClass
from shadho_celery.transport.registry import MAX_VIRTUAL

#: slot seconds that a study may be ahead of another before it waits. The other learns from announcements that it may
#: take more. These are up to three seconds old, and no slot should be idle until then
LEEWAY_SECONDS = 3.0

#: slot seconds ahead at which a study is about to wait; others take over its slots, as it may already wait
NEARLY_SECONDS = 1.0

#: seconds that a message costs a worker: the minimum slot time of an attempt
MESSAGE_SECONDS = 0.001

#: fraction of a slot below which a share is a rounding error
ROUNDING = 1e-9


@dataclass
class _Turn:
    """State of a study's turns in one class."""

    #: slot seconds of the attempts that have ended
    ended: float = 0.0
    #: virtual time at which no slot seconds had been used
    origin: float = 0.0
    #: True if the study wanted more slots than it had at the last look
    is_wanting: bool = False
    #: weight and virtual time of the other studies that wanted more slots then
    others: Sequence[tuple[float, float]] = ()
    #: fractions of a slot beyond whole slots in the shares: this study's first, then those of the others
    parts: Sequence[float] = (0.0,)
    #: slot seconds ahead of the study furthest behind then; None unless this study waited with whole slots of its own
    lead: float | None = None


class Turns:
    """Turns of one study in each class."""

    def __init__(self, weight: float) -> None:
        self._weight = weight
        self._turns: dict[str, _Turn] = defaultdict(_Turn)

    def end(self, sent: Sent, now: float, seconds: float | None = None) -> None:
        """Record the slot seconds of an ended attempt. `seconds` is the time that its worker measured."""
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
        """Update the turns in a class. Return the study's virtual time there.

        `others` are pairs of weight and virtual time of the other studies that want more slots. `sent` are this study's
        attempts in flight.
        """
        turn = self._turns[known.name]
        had_others, turn.others = bool(turn.others), others
        used = sum([each.slot_seconds(now) for each in sent])
        if not others:
            turn.lead, turn.is_wanting = None, is_wanting
            return self._virtual(turn, used)
        turn.parts = parts(known.slots, known.share, [weight / self._weight for weight, _ in others])
        if not turn.is_wanting:
            turn.origin -= min(0.0, self._lead(turn, used)) / self._weight
        if not had_others:
            # They start from now: what this study used alone is not a debt.
            turn.origin -= max(0.0, self._lead(turn, used)) / self._weight
        running = sum(each.attempt.slots for each in sent if each.is_claimed)
        has_own = 0 < math.floor(known.share) >= running
        if turn.lead is not None and has_own:
            # It waits, and what it uses is its own share. Otherwise the seconds that the others lose between their
            # trials would add up to a debt.
            turn.origin -= max(0.0, self._lead(turn, used) - turn.lead) / self._weight
        lead = self._lead(turn, used)
        turn.lead = lead if has_own and lead > LEEWAY_SECONDS else None
        turn.is_wanting = is_wanting
        return self._virtual(turn, used)

    def extras(self, sent: Iterable[Sent], now: float) -> dict[str, int]:
        """Return the number of slots beyond its whole ones that the study may take now, by class.

        Classes where it may only take the slot that rounds its share up are left out.
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
        # These slots are left by the studies that are ahead, for this study and others. If it is alone, it may also
        # fill the gaps between the trials of the others.
        left = math.ceil(sum(turn.parts) - ROUNDING) - sum(part > 0 for part in beside)
        return max(left, 0 if beside else 1) or None

    def _virtual(self, turn: _Turn, used: float) -> float:
        """Return the virtual time when the attempts in flight have `used` this many slot seconds."""
        return min(MAX_VIRTUAL, max(0.0, turn.origin + (turn.ended + used) / self._weight))

    def _lead(self, turn: _Turn, used: float) -> float:
        """Return the slot seconds ahead of the study that is furthest behind; below 0 if that is this study."""
        last = min((virtual for _, virtual in turn.others), default=math.inf)
        return self._weight * (self._virtual(turn, used) - last)


def parts(slots: int, share: float, others: Sequence[float]) -> list[float]:
    """Return the fraction of a slot beyond whole ones for each share, this study's first.

    `others` are the shares of the other studies that want more slots, as multiples of this study's `share`.
    """
    return [share % 1, *(whole(min(slots, share * other)) % 1 for other in others)]


def allow(slots: int, weight: float, others: Sequence[tuple[float, float]]) -> float:
    """Return the number of slots that a study of `weight` may use beside `others`, pairs of weight and wanted slots.

    Slots are divided by weight. What a study does not want goes to the others (water filling).
    """
    free, total = float(slots), weight + sum(other for other, _ in others)
    # Studies that want least relative to their weight are served first, in full if their part is enough.
    for other, want in sorted(others, key=lambda pair: pair[1] / pair[0]):
        part = min(want, free * other / total)
        free -= part
        total -= other
    return whole(free)


def whole(slots: float) -> float:
    """Return a number of slots, rounded if it differs from a whole number only by a rounding error."""
    nearest = float(round(slots))
    return nearest if nearest and abs(slots - nearest) < ROUNDING else slots
