"""What is published is what Celery's own client would publish, as far as its worker reads it."""

from __future__ import annotations

import json
import re
from typing import Any

import kombu
import msgspec
import pytest
from celery.app.task import Context
from celery.worker.request import Request

from shadho_celery.celery import app
from shadho_celery.core.hardware import CLASS_NAME
from shadho_celery.core.payload import Payload
from shadho_celery.core.trial import Attempt
from shadho_celery.fleet import broker
from shadho_celery.fleet.broker import PROTOCOL, RefusedMessage, read_message
from shadho_celery.fleet.signing import UNSIGNED, Signer

PAYLOAD = Payload(
    study="k1",
    module="tasks.svm",
    attempts=[
        Attempt(number=7, attempt=2, subspace="all", params={"größe": 1e-3, "n": 2**40}, seed=5),
        Attempt(number=8, attempt=1, subspace="all", params={}, seed=6),
    ],
)
#: what of it lies in a message
PLAIN = msgspec.to_builtins(PAYLOAD)


def test_the_message_is_celerys_own_but_for_what_names_its_origin() -> None:
    body, headers, properties = broker.message(PAYLOAD)
    theirs = app.amqp.as_task_v2(headers["id"], broker.TASK, args=[PLAIN], kwargs={}, ignore_result=True)
    assert json.loads(json.dumps(body)) == json.loads(json.dumps(theirs.body))
    assert properties == theirs.properties
    ours = {"argsrepr", "kwargsrepr", "origin", "shadho_protocol", "shadho_signature"}
    # What it leaves out is, in Celery's own message, as empty as what is missing.
    missing = {name: value for name, value in theirs.headers.items() if name not in headers}
    assert not any(missing.values()), missing
    same = headers.keys() - ours
    assert {name: headers[name] for name in same} == {name: theirs.headers[name] for name in same}
    assert {"lang", "task", "id", "root_id", "eta", "expires", "retries", "timelimit", "ignore_result"} <= same
    assert headers["shadho_protocol"] == broker.PROTOCOL


def received(sent: tuple[Any, Any, Any]) -> tuple[Request, Any]:
    """The request that Celery's worker makes of a message, and the message's headers."""
    body, headers, properties = sent
    message = kombu.Message(
        json.dumps(body),
        headers=headers,
        properties=properties,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"exchange": "", "routing_key": "gpu_large"},
    )
    return Request(message, app=app), headers


def test_celerys_worker_reads_the_payload_and_ignores_the_result() -> None:
    request, headers = received(broker.message(PAYLOAD))
    assert (request.id, request.name) == (headers["id"], broker.TASK)
    args, kwargs, embedded = request._payload
    assert (args, kwargs) == ([PLAIN], {})
    assert not any(embedded.values())
    assert request.ignore_result is True
    assert list(request.time_limits) == [None, None]
    assert (request.eta, request.expires) == (None, None)


def test_monitors_see_which_trials_travel_and_not_their_params() -> None:
    _, headers, _ = broker.message(PAYLOAD)
    assert "k1" in headers["argsrepr"]
    assert "7" in headers["argsrepr"]
    assert "8" in headers["argsrepr"]
    assert "größe" not in headers["argsrepr"]


def test_every_message_has_an_id_of_its_own() -> None:
    ids = {broker.message(PAYLOAD)[1]["id"] for _ in range(100)}
    assert len(ids) == 100


def test_a_classs_queue_is_durable_and_declared_alike_by_everybody() -> None:
    queue = broker.queue("größte")
    assert (queue.name, queue.routing_key, queue.exchange.name) == ("größte", "größte", "")
    assert queue.durable
    assert not queue.auto_delete
    assert not queue.exclusive
    assert not queue.queue_arguments, "arguments of an existing queue cannot be changed"
    assert queue == broker.queue("größte")


def test_a_machines_queue_expires_and_has_a_name_that_no_class_can_have() -> None:
    name = broker.machine_queue("größte", "node@1")
    queue = broker.queue(name)
    assert (queue.name, queue.routing_key, queue.exchange.name) == (name, name, "")
    assert queue.durable
    assert queue.expires == broker.MACHINE_QUEUE_SECONDS
    assert re.match(CLASS_NAME, "größte")
    assert not re.match(CLASS_NAME, name)


@pytest.mark.parametrize("compute_class", ["cpu", "学" * 60])
@pytest.mark.parametrize("length", [10, 255])
def test_a_machines_queue_has_a_name_that_amqp_takes_and_no_other_machine_has(compute_class: str, length: int) -> None:
    hosts = ["ü" * length, "ü" * (length - 1) + "u"]
    names = {broker.machine_queue(compute_class, host) for host in hosts}
    assert len(names) == 2
    assert all(len(name.encode()) <= 255 and name.startswith(f"{compute_class},") for name in names)


SIGNER = Signer(b"a key of sixteen bytes")


def travelled(signer: Signer) -> tuple[Any, Any]:
    """Payload and request as a worker's task sees them, after the broker and Celery."""
    request, _ = received(broker.message(PAYLOAD, signer))
    return request._payload[0][0], Context(request.request_dict)


def refusal(plain: Any, headers: Any, signer: Signer = UNSIGNED) -> str:
    with pytest.raises(RefusedMessage) as caught:
        read_message(plain, headers, signer)
    return str(caught.value)


def test_a_signed_message_is_taken_with_the_same_key_or_without_any() -> None:
    for signer in (SIGNER, UNSIGNED):
        assert read_message(*travelled(SIGNER), signer) == PAYLOAD
    assert read_message(*travelled(UNSIGNED), UNSIGNED) == PAYLOAD


def test_a_message_without_the_workers_signature_is_refused() -> None:
    for signer in (UNSIGNED, Signer(b"another key of sixteen bytes")):
        assert "not signed" in refusal(*travelled(signer), SIGNER)


@pytest.mark.parametrize("signature", [None, "", 5, ["x"], "ü"])
def test_whatever_stands_where_the_signature_should_is_refused(signature: Any) -> None:
    headers = {"shadho_protocol": PROTOCOL, "shadho_signature": signature}
    assert "not signed" in refusal(PLAIN, headers, SIGNER)
    assert read_message(PLAIN, headers) == PAYLOAD


def test_a_signature_holds_for_no_other_payload() -> None:
    plain, headers = travelled(SIGNER)
    plain["attempts"][0]["params"]["n"] += 1
    assert "not signed" in refusal(plain, headers, SIGNER)


@pytest.mark.parametrize("protocol", [None, 2, str(PROTOCOL), PROTOCOL + 1, "x" * 1000])
def test_a_message_of_another_protocol_is_refused_with_both_named_before_anything_else(protocol: Any) -> None:
    told = refusal("no payload", {"shadho_protocol": protocol}, SIGNER)
    assert f"protocol {str(protocol)[:20]} was refused: this worker speaks {PROTOCOL}" in told
    assert len(told) < 100


def test_a_payload_that_is_none_is_refused_though_it_is_signed_or_needs_not_be() -> None:
    plain, headers = travelled(SIGNER)
    assert "$.study" in refusal({**plain, "study": "../x"}, headers)
    assert "Expected `object`" in refusal(None, headers)


def test_a_broker_that_cannot_be_used_is_refused_with_what_has_named_it(monkeypatch: pytest.MonkeyPatch) -> None:
    url = "redis://127.0.0.1:1/0"
    monkeypatch.delenv("CELERY_BROKER_URL", raising=False)
    assert str(broker.unusable(url, OSError("refused"))).endswith("or check broker_url of celeryconfig.py")
    monkeypatch.setenv("CELERY_BROKER_URL", url)
    assert str(broker.unusable(url, OSError("refused"))).endswith("or check CELERY_BROKER_URL")
