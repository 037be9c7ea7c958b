"""Families of metrics of one worker: its slots, state, ended trials, heartbeats and outages."""

from __future__ import annotations

from collections.abc import Sequence

from shadho_celery.core.trial import TrialState
from shadho_celery.metrics.server import Collector, Family, Kind
from shadho_celery.node.slots import Slots

#: states of a worker
STATES = ("serving", "drained", "ending", "quarantined")


FAMILIES: Sequence[Family[Slots]] = [
    Family("shadho_worker_slots", "Number of slots.", read=lambda slots: {(): slots.worker.slots}),
    Family("shadho_worker_busy_slots", "Number of slots that run a trial.", read=lambda slots: {(): len(slots.leases)}),
    Family(
        "shadho_worker_state",
        "1 for the state of the worker: serving, drained, ending or quarantined.",
        labels=("state",),
        read=lambda slots: {(state,): float(state == slots.heartbeat.state) for state in STATES},
    ),
    Family(
        "shadho_worker_trials",
        "Trials that have ended on this worker, by the state that they ended in.",
        labels=("state",),
        kind=Kind.COUNTER,
        read=lambda slots: {
            (state.lower(),): slots.heartbeat.tally.trials[state] for state in TrialState if state.is_finished
        },
    ),
    Family(
        "shadho_worker_trial_seconds",
        "Seconds of the trials that have ended on this worker.",
        kind=Kind.SUMMARY,
        read=lambda slots: {(): (slots.heartbeat.tally.trials.total(), slots.heartbeat.tally.seconds)},
    ),
    Family(
        "shadho_worker_heartbeats",
        "Announcements to the schedulers.",
        kind=Kind.COUNTER,
        read=lambda slots: {(): slots.heartbeat.tally.heartbeats},
    ),
    Family(
        "shadho_worker_heartbeat_age_seconds",
        "Seconds since the last announcement; after 20 the schedulers do not know the worker.",
        read=lambda slots: {(): slots.heartbeat.age},
    ),
    Family(
        "shadho_worker_renewals",
        "Renewals of the leases of running attempts.",
        kind=Kind.COUNTER,
        read=lambda slots: {(): slots.heartbeat.tally.renewals},
    ),
    Family(
        "shadho_worker_outages",
        "Times that Redis has stopped to answer.",
        kind=Kind.COUNTER,
        read=lambda slots: {(): slots.heartbeat.tally.redis.count},
    ),
]


def collector(slots: Slots) -> Collector[Slots]:
    """Return the collector of a worker's metrics."""
    return Collector(FAMILIES, slots, {"class": slots.worker.compute_class})
