"""The records that a worker's and a scheduler's threads decode may be decoded by many of them at once."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]

#: msgspec works out a record's types when it first needs them: only in a fresh interpreter nobody has needed them yet
DECODE_AT_ONCE = """
import sys, threading
import msgspec
from shadho_celery.core.code import CodeVersion
from shadho_celery.core.hardware import Machine
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Called, GangCall, Outcome, ReplicaFailed, ReplicaSeat, Report, Result, Started
from shadho_celery.core.trial import Attempt, Event, GangEvent, Lost, TrialState
from shadho_celery.runner import protocol
from shadho_celery.fleet.broker import PROTOCOL, read_message
from shadho_celery.fleet.channel import unseal
from shadho_celery.fleet.registry import Worker, StudyWants
from shadho_celery.fleet.signing import UNSIGNED

sys.setswitchinterval(1e-6)

attempt = Attempt(number=0, attempt=1, subspace="all", params={"x": 0.5}, not_on="h")
seat = ReplicaSeat(address="h:1", token="t", rank=1)
gang = GangCall(address="h:1", token="t")
outcome = Outcome(state=TrialState.COMPLETE, loss=0.5)
where = {"number": 0, "attempt": 1}

def payload():
    sent = Payload(study="s", module="m", attempts=[attempt], replica=seat)
    assert read_message(msgspec.to_builtins(sent), {"shadho_protocol": PROTOCOL}) == sent

def event(sent):
    assert unseal("s", UNSIGNED.seal("s", sent), UNSIGNED) == sent

def to_child(sent):
    assert protocol.decode_to_child(protocol.encode(sent).decode()) == sent

def from_child(sent):
    assert protocol.decode_from_child(protocol.encode(sent)) == sent

def announcement(sent):
    assert msgspec.convert(msgspec.to_builtins(sent), type(sent)) == sent

order = protocol.RunAttempt(
    payload=Payload(study="s", module="m", attempts=[attempt], replica=seat),
    checkpoint_dir="", compute_class="cpu", slot=0
)
works = {
    "payload": [payload],
    "events": [
        lambda: event(Started(**where, host="h", at=0.0)),
        lambda: event(Report(**where, step=1, loss=0.5, at=0.0)),
        lambda: event(Result(**where, outcome=outcome, at=0.0)),
        lambda: event(Lost(**where, reason="silence")),
        lambda: event(Called(**where, call=1, gang=gang, at=0.0)),
        lambda: event(ReplicaFailed(**where, call=1, rank=1, error="e", host="h", at=0.0)),
    ],
    "to a child": [
        lambda: to_child(order), lambda: to_child(protocol.Tell(order=3, what="recall")),
    ],
    "from a child": [
        lambda: from_child(protocol.Ready(codes={"m": CodeVersion(files={"m.py": ""})})),
        lambda: from_child(protocol.Refused(order=1, code=CodeVersion(problem="why"))),
        lambda: from_child(protocol.Reported(order=1, step=1, loss=0.5)),
        lambda: from_child(protocol.Gang(order=1, call=gang)),
        lambda: from_child(protocol.Ended(order=1, outcome=outcome)),
    ],
    "announcements": [
        lambda: announcement(Worker(machine=Machine(host="h"), codes={"m": CodeVersion()})),
        lambda: announcement(StudyWants(wants={"cpu": 1.0}))
    ],
}
groups = [[work for group in works.values() for work in group]] if sys.argv[1] == "all" else works.values()
failed = []
ready = threading.Barrier(24)

def decode(first):
    for chosen in groups:
        ready.wait()
        try:
            for each in range(2 * len(chosen)):
                chosen[(first + each) % len(chosen)]()
        except BaseException as error:
            failed.append(error)

threads = [threading.Thread(target=decode, args=(number,)) for number in range(24)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert not failed, failed
"""


@pytest.mark.slow
@pytest.mark.parametrize("records", ["all", "one kind after the other"])
def test_many_threads_may_decode_their_first_records_at_once(records: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", DECODE_AT_ONCE, records], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
