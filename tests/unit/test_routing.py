"""What is published is what Celery's own client would publish, as far as its worker reads it."""

from __future__ import annotations

import json

import kombu
from celery.worker.request import Request

from shadho_celery import routing
from shadho_celery.celery import app

PAYLOAD = {
    "study": "k1",
    "module": "tasks.svm",
    "attempts": [
        {"number": 7, "attempt": 2, "params": {"größe": 1e-3, "n": 2**40}, "seed": 5},
        {"number": 8, "attempt": 1, "params": {}, "seed": 6},
    ],
}


def test_the_message_is_celerys_own_but_for_what_names_its_origin() -> None:
    body, headers, properties = routing.message(PAYLOAD)
    theirs = app.amqp.as_task_v2(headers["id"], routing.TASK, args=[PAYLOAD], kwargs={}, ignore_result=True)
    assert json.loads(json.dumps(body)) == json.loads(json.dumps(theirs.body))
    assert properties == theirs.properties
    ours = {"argsrepr", "kwargsrepr", "origin", "shadho_protocol"}
    # What it leaves out is, in Celery's own message, as empty as what is missing.
    missing = {name: value for name, value in theirs.headers.items() if name not in headers}
    assert not any(missing.values()), missing
    same = headers.keys() - ours
    assert {name: headers[name] for name in same} == {name: theirs.headers[name] for name in same}
    assert {"lang", "task", "id", "root_id", "eta", "expires", "retries", "timelimit", "ignore_result"} <= same
    assert headers["shadho_protocol"] == routing.PROTOCOL


def test_celerys_worker_reads_the_payload_and_ignores_the_result() -> None:
    body, headers, properties = routing.message(PAYLOAD)
    message = kombu.Message(
        json.dumps(body),
        headers=headers,
        properties=properties,
        content_type="application/json",
        content_encoding="utf-8",
        delivery_info={"exchange": "", "routing_key": "gpu_large"},
    )
    request = Request(message, app=app)
    assert (request.id, request.name) == (headers["id"], routing.TASK)
    args, kwargs, embedded = request._payload
    assert (args, kwargs) == ([PAYLOAD], {})
    assert not any(embedded.values())
    assert request.ignore_result is True
    assert list(request.time_limits) == [None, None]
    assert (request.eta, request.expires) == (None, None)


def test_monitors_see_which_trials_travel_and_not_their_params() -> None:
    _, headers, _ = routing.message(PAYLOAD)
    assert "k1" in headers["argsrepr"]
    assert "7" in headers["argsrepr"]
    assert "8" in headers["argsrepr"]
    assert "größe" not in headers["argsrepr"]


def test_every_message_has_an_id_of_its_own() -> None:
    ids = {routing.message(PAYLOAD)[1]["id"] for _ in range(100)}
    assert len(ids) == 100


def test_a_classs_queue_is_durable_and_declared_alike_by_everybody() -> None:
    queue = routing.queue("größte")
    assert (queue.name, queue.routing_key, queue.exchange.name) == ("größte", "größte", "")
    assert queue.durable
    assert not queue.auto_delete
    assert not queue.exclusive
    assert not queue.queue_arguments, "arguments of an existing queue cannot be changed"
    assert queue == routing.queue("größte")
