"""Broker: queues of compute classes and machines, and the messages that carry attempts to workers.

Scheduler and workers both declare a queue through `queue`, so its arguments cannot differ. The scheduler builds
Celery's messages (protocol 2) itself and publishes all attempts of a pass of its loop in one batch. Calling
`apply_async` for each attempt costs ten times as much.

If Redis is the broker, kombu takes one item after another from a queue's list, and stores it in a hash until it is
acknowledged. An item that kombu cannot read would stop the worker. Here the worker logs a warning and continues.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import uuid
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from queue import Empty
from typing import Any

import amqp
import kombu
import kombu.message
import kombu.transport.pyamqp
import kombu.transport.redis
import kombu.transport.virtual
import msgspec
from kombu.exceptions import KombuError

from shadho_celery.core.checks import mask, mask_in, one_line
from shadho_celery.core.payload import Payload
from shadho_celery.core.system import BROKER_CONNECT_SECONDS, BROKER_SECONDS
from shadho_celery.errors import ServiceError
from shadho_celery.fleet.celery_settings import configuration
from shadho_celery.fleet.signing import UNSIGNED, Signer
from shadho_celery.fleet.urls import BROKER, DEFAULTS, UNTRUSTED, remedy

log = logging.getLogger(__name__)

#: version of the format of messages and of the channel's records; scheduler and workers must have the same version
PROTOCOL = 13

#: name of the Celery task that runs a trial
TASK = "shadho.trial"

#: signs of a permanent refusal: AMQP's codes (access refused, not allowed), and the words that Redis uses
_DENIED = (403, 530)
_DENIALS = ("WRONGPASS", "NOPERM", "NOAUTH", "invalid username-password", "Authentication required", "no permissions")

#: exceptions raised for a URL that its transport cannot use, and for a Redis whose answers are not understood
MISUNDERSTOOD = (ValueError, TypeError, AttributeError, LookupError)

#: maximum number of messages in one batch (Redis), or of messages not yet confirmed by the broker (RabbitMQ)
BATCH = 500

#: seconds without a consumer after which RabbitMQ removes a machine's queue and its messages
MACHINE_QUEUE_SECONDS = 300

#: seconds for which a publisher waits for notices that RabbitMQ may already have sent
NOTICE_SECONDS = 0.001

#: name of a queue that does not exist: RabbitMQ drops a message to it
NOWHERE = "shadho.nowhere"

#: maximum number of bytes of a message's body; an attempt with a thousand params has about 40,000
MAX_BODY = 10_000_000

#: headers with Celery's options, with values that have no effect. With other values, Celery might keep a message in a
#: slot without running it
OPTIONS: Mapping[str, Any] = {"eta": None, "retries": 0, "timelimit": [None, None]}

#: maximum number of bytes of a queue's name in AMQP
_MAX_NAME = 255


class RefusedMessage(Exception):
    """A message that a worker must not act on. The text gives the reason."""


class Message(kombu.message.Message):  # type: ignore[misc]
    """A received message. It is refused without being decoded unless it has the form that `message` produces.

    Without this, kombu would decompress a message as soon as it arrives, before its signature can be checked.
    """

    def __init__(self, body: Any = None, headers: Any = None, **parts: Any) -> None:
        given = headers or {}
        reasons = {
            "it is compressed": given.get("compression"),
            "it is not JSON": (parts["content_type"], parts["content_encoding"]) != ("application/json", "utf-8"),
            f"it has more than {MAX_BODY:,} bytes": len(body or "") > MAX_BODY,
            "it has options of Celery": any(given.get(name, plain) != plain for name, plain in OPTIONS.items()),
        }
        self.errors = [(RefusedMessage, RefusedMessage(each), None) for each, is_true in reasons.items() if is_true]
        super().__init__(body, headers=headers, **parts)


class _AmqpMessage(kombu.transport.pyamqp.Message, Message):  # type: ignore[misc]
    """A `Message` from RabbitMQ: kombu's class parses the message of py-amqp, then calls `Message.__init__`."""


class _AmqpChannel(kombu.transport.pyamqp.Channel):  # type: ignore[misc]
    """kombu's channel for RabbitMQ, which creates an `_AmqpMessage` for each message."""

    Message = _AmqpMessage


class _AmqpConnection(kombu.transport.pyamqp.Connection):  # type: ignore[misc]
    """A connection to RabbitMQ that is closed if RabbitMQ does not answer a request within BROKER_SECONDS.

    py-amqp waits for answers, also while it closes, without a limit unless its socket has a timeout.
    """

    Channel = _AmqpChannel

    def connect(self, callback: Any = None) -> Any:
        answer = super().connect(callback)
        self.transport.sock.settimeout(BROKER_SECONDS)
        return answer

    def drain_events(self, timeout: float | None = None) -> None:
        try:
            super().drain_events(timeout)
        except TimeoutError:
            if timeout is None:
                self.collect()
            raise


class _Bounded(kombu.transport.pyamqp.Transport):  # type: ignore[misc]
    """kombu's transport for RabbitMQ that uses `_AmqpConnection`."""

    Connection = _AmqpConnection


class _BoundedTls(_Bounded, kombu.transport.pyamqp.SSLTransport):  # type: ignore[misc]
    """The transport `_Bounded` with TLS."""


#: maximum number of bytes of an item; it is larger than MAX_BODY, because an item contains the body in base64
MAX_ITEM = 2 * MAX_BODY


class NotAMessage(ValueError):
    """An item in a queue is JSON, but not in the format of a message."""


class _RedisMessage(kombu.transport.virtual.Message, Message):  # type: ignore[misc]
    """A `Message` from Redis. If its format is wrong, it raises NotAMessage before it counts as delivered."""

    def __init__(self, payload: Any, channel: Any = None, **options: Any) -> None:
        try:
            super().__init__(payload, channel=channel, **options)
            delivery = [self.delivery_tag, self.delivery_info["exchange"], self.delivery_info["routing_key"]]
            if [part for part in delivery if not isinstance(part, str)]:
                raise TypeError("its delivery info is not text")
        except (AttributeError, LookupError, TypeError, ValueError) as error:
            raise NotAMessage(f"{type(error).__name__}: {error}") from None


class _RedisChannel(kombu.transport.redis.Channel):  # type: ignore[misc]
    """kombu's channel for Redis, which skips items that are too long or not messages, and keeps one client."""

    Message = _RedisMessage
    _kept: Any = None

    @contextmanager
    def conn_or_acquire(self, client: Any = None) -> Iterator[Any]:
        # kombu creates a client for each message that it sends, takes or acknowledges, which costs as much as the call
        # itself.
        if client is None and (self._kept is None or self._kept.connection_pool is not self.pool):
            self._kept = self._create_client()
        yield self._kept if client is None else client

    def _create_client(self, asynchronous: bool = False) -> Any:
        client = super()._create_client(asynchronous)
        client.set_response_callback("BRPOP", _short)
        return client

    def _brpop_read(self, **options: Any) -> Any:
        try:
            return super()._brpop_read(**options)
        except (json.JSONDecodeError, UnicodeDecodeError, RecursionError, NotAMessage) as error:
            log.error("skipped an item in the queue that is not a message: %s", one_line(error))
            raise Empty from None


def _short(answer: Any, **_: Any) -> tuple[bytes, bytes] | None:
    """Return the queue and the item in an answer of BRPOP. Raises NotAMessage if the item is too long."""
    if answer and len(answer[1]) > MAX_ITEM:
        raise NotAMessage(f"it has more than {MAX_ITEM:,} bytes")
    return tuple(answer) if answer else None


class _RedisTransport(kombu.transport.redis.Transport):  # type: ignore[misc]
    """kombu's transport for Redis that uses `_RedisChannel`."""

    Channel = _RedisChannel


#: kombu's transport -> the subclass that replaces it
_TRANSPORTS = {
    kombu.transport.pyamqp.Transport: _Bounded,
    kombu.transport.pyamqp.SSLTransport: _BoundedTls,
    kombu.transport.redis.Transport: _RedisTransport,
}


class Connection(kombu.Connection):  # type: ignore[misc]
    """A connection to any broker with a time limit for each request. For Redis, `_connection` sets the limit as an
    option.
    """

    def get_transport_cls(self) -> Any:
        found = super().get_transport_cls()
        return _TRANSPORTS.get(found, found)


def machine_queue(compute_class: str, host: str) -> str:
    """Return the name of the queue for the workers of a class on one machine: ``class,host``.

    A class name has no comma, so no class has a queue of this name. If the name would be too long, a digest replaces
    the host's name. A truncated name might equal that of another host, whose workers would decline the attempts.
    """
    name = f"{compute_class},{host}"
    if len(name.encode()) <= _MAX_NAME:
        return name
    return f"{compute_class},{hashlib.blake2b(host.encode(), digest_size=6).hexdigest()}"


def queue(name: str) -> kombu.Queue:
    """Return the queue of a compute class or of a machine. It is durable and bound to the default exchange.

    The queue of a class has no arguments, because the arguments of an existing queue cannot be changed; the consumer
    timeout is set in the broker's configuration file. The queue of a machine expires, because nothing else removes it
    once the machine is gone.
    """
    expires = MACHINE_QUEUE_SECONDS if "," in name else None
    return kombu.Queue(name, kombu.Exchange(""), routing_key=name, durable=True, expires=expires)


def message(payload: Payload, signer: Signer = UNSIGNED) -> tuple[Any, dict[str, Any], dict[str, Any]]:
    """Return body, headers and properties of the Celery message that calls the trial task with `payload`."""
    task_id = str(uuid.uuid4())
    plain: dict[str, Any] = msgspec.to_builtins(payload)
    body: Any = ([plain], {}, {"callbacks": None, "errbacks": None, "chain": None, "chord": None})
    headers = {
        "lang": "py",
        "task": TASK,
        "id": task_id,
        "root_id": task_id,
        **dict.fromkeys(("parent_id", "group", "expires")),
        **OPTIONS,
        # Shown by monitoring tools instead of the params, which may be long.
        "argsrepr": f"(study {payload.study}, trials {[attempt.number for attempt in payload.attempts]})",
        "kwargsrepr": "{}",
        "origin": "shadho",
        "ignore_result": True,
        "shadho_protocol": PROTOCOL,
        "shadho_signature": signer.sign(_signed(plain)) if signer.fingerprint else "",
    }
    return body, headers, {"correlation_id": task_id, "reply_to": ""}


def read_message(plain: Any, headers: Any, signer: Signer = UNSIGNED) -> Payload:
    """Return the payload of a message. Raises RefusedMessage if the worker must not act on the message.

    `headers` are the message's headers or Celery's request; any object with `get` works.
    """
    protocol = headers.get("shadho_protocol")
    if protocol != PROTOCOL:
        raise RefusedMessage(f"a message of protocol {str(protocol)[:20]} was refused: this worker speaks {PROTOCOL}")
    try:
        payload = msgspec.convert(plain, Payload)
    except msgspec.ValidationError as error:
        raise RefusedMessage(f"a message was refused: {error}") from None
    if signer.fingerprint and not signer.is_signed(_signed(plain), str(headers.get("shadho_signature"))):
        raise RefusedMessage("a message was refused: it is not signed with this worker's key; see --signing-key-file")
    return payload


def check_access(connection: kombu.Connection, names: Sequence[str], url: str = "") -> str | None:
    """Raise ServiceError if the broker refuses the connection, or refuses to let it consume these queues.

    Return a line with the remedy if the broker does not answer, else None. Call this before a worker starts: Celery
    reconnects for ever, which is right while a broker is down, but hides the reason for a permanent refusal.
    `connection` is an unopened connection of Celery; it is closed afterwards. `url` is shown in error messages.
    """
    url = url or connection.as_uri()
    name = names[0]
    try:
        with opened(connection):
            channel = connection.default_channel
            for name in names:
                queue(name)(channel).declare()
                if connection.transport.driver_type == "amqp":
                    # `basic_get` needs the same permission as consuming. A message that it gets returns to the queue
                    # when the channel closes.
                    channel.basic_get(name)
    except (*connection.connection_errors, *connection.channel_errors, KombuError, OSError, *MISUNDERSTOOD) as error:
        if UNTRUSTED in str(error) or isinstance(error, MISUNDERSTOOD):
            raise unusable(url, error) from error
        if getattr(error, "code", None) in _DENIED or any(words in str(error) for words in _DENIALS):
            cause = one_line(mask_in(str(error), url))
            raise ServiceError(
                f"the broker at {mask(url)} does not let this worker serve {name} ({cause}); "
                "check user and password in CELERY_BROKER_URL, and the user's permissions"
            ) from error
        return f"{unusable(url, error)}; this worker tries again until the broker answers"
    return None


def depths(names: Iterable[str]) -> dict[str, int | None]:
    """Return the number of messages that wait in each of these queues, or None for a queue that does not exist.

    Raises ServiceError if the broker cannot be used.
    """
    connection = configured()
    try:
        with opened(connection):
            return depths_on(connection, names)
    except (*connection.connection_errors, *connection.channel_errors, KombuError, OSError, *MISUNDERSTOOD) as error:
        raise unusable(configuration()["broker_url"], error) from error


def depths_on(connection: kombu.Connection, names: Iterable[str]) -> dict[str, int | None]:
    """Do the same as `depths`, over an open connection. Raises the connection's errors."""
    found: dict[str, int | None] = {}
    channel = connection.channel()
    for name in names:
        try:
            found[name] = channel.queue_declare(name, passive=True).message_count
        except amqp.ChannelError:
            # The broker has closed the channel, and py-amqp has opened it again.
            # In Redis a queue exists only while it is not empty.
            found[name] = None if connection.transport.driver_type == "amqp" else 0
    return found


@contextmanager
def opened(connection: kombu.Connection) -> Iterator[None]:
    """Open a connection for the duration of a `with` block. After an error, close it without notifying the broker."""
    try:
        _open(connection)
        yield
    except BaseException:
        connection.collect()
        raise
    connection.release()


def configured() -> kombu.Connection:
    """Return a connection to the configured broker with the workers' settings. It is not open yet."""
    return _connection(*_configured())


def _configured() -> tuple[str, Mapping[str, Any], Mapping[str, Any] | bool]:
    """Return URL, transport options and TLS options of the configured broker."""
    settings = configuration()
    options = settings.get("broker_transport_options") or {}
    return settings["broker_url"], options, settings.get("broker_use_ssl", False)


def _open(connection: kombu.Connection) -> None:
    # The first try uses up the time limit if the server does not respond, so only a refused connection is tried again.
    connection.ensure_connection(
        max_retries=1, interval_start=0.2, timeout=BROKER_CONNECT_SECONDS, reraise_as_library_errors=False
    )


def _connection(url: str, options: Mapping[str, Any], ssl: Mapping[str, Any] | bool) -> kombu.Connection:
    """Return a connection that is not open yet. Use Celery's `broker_transport_options` and `broker_use_ssl`."""
    connection = Connection(
        url, ssl=ssl, connect_timeout=BROKER_CONNECT_SECONDS, heartbeat=0, transport_options=dict(options)
    )
    if connection.get_transport_cls().driver_type == "redis":
        # These limits are not for a worker's own connection, which waits in a read for its next message.
        connection.transport_options |= {
            "socket_timeout": BROKER_SECONDS,
            "socket_connect_timeout": BROKER_CONNECT_SECONDS,
        }
    return connection


class Publisher:
    """Publishes messages to their queues. A message may be published twice: an attempt can be claimed only once."""

    def __init__(
        self,
        url: str,
        options: Mapping[str, Any] | None = None,
        ssl: Mapping[str, Any] | bool = False,
        signer: Signer = UNSIGNED,
    ) -> None:
        """Open a connection. `options` and `ssl` are Celery's `broker_transport_options` and `broker_use_ssl`.

        Raises ServiceError if the broker cannot be used.
        """
        self._url = url
        self._signer = signer
        #: connection to the broker
        self._connection = connection = _connection(url, options or {}, ssl)
        # KeyError: no transport knows the URL's scheme. ValueError: the URL cannot be parsed.
        named = (KombuError, OSError, KeyError, ValueError)
        self._failures = (*connection.connection_errors, *connection.channel_errors, *named)
        if self._connection.get_transport_cls().driver_type == "amqp":
            self._connection.transport_options |= {"on_blocked": self._on_blocked, "on_unblocked": self._on_unblocked}
        #: True while RabbitMQ does not read from this connection, because its memory or disk is nearly full
        self._is_blocked = False
        self._producer: kombu.Producer | None = None
        self._open()

    @classmethod
    def configured(cls) -> Publisher:
        """Return a publisher for the configured broker, with the workers' settings (`configuration`)."""
        return cls(*_configured(), Signer.configured())

    def publish(self, payloads: Iterable[tuple[str, Payload]]) -> None:
        """Send each payload to the queue given beside it. Raises ServiceError if the broker does not accept them."""
        batch = list(payloads)
        # The connection may have been lost while idle, so try a new one. If the server does not respond, opening it
        # fails, and the messages are not published again.
        for is_last in (False, True):
            if self._producer is None:
                self._open()
            try:
                self._publish(batch)
                return
            except self._failures as error:
                # Keep a blocked connection. RabbitMQ does not read from it, so RabbitMQ would not notice its closing.
                if (refusal := self.refusal) is None:
                    self._drop()
                if refusal or is_last:
                    raise refusal or unusable(self._url, error) from error

    @property
    def refusal(self) -> ServiceError | None:
        """Reason why RabbitMQ accepts no messages, according to its last notice, or None."""
        if not self._is_blocked:
            return None
        return ServiceError(
            f"trials cannot be sent: the broker at {mask(self._url)} takes no messages, because its memory or disk is "
            "nearly full; see rabbitmq-diagnostics alarms"
        )

    def look(self) -> None:
        """Read notices in which RabbitMQ says that it accepts messages, or that it does not. Do not wait for notices.

        Call this now and then while nothing is published.
        """
        if not self._has_confirms:
            return
        try:
            if self._producer is None:
                self._open()
            with suppress(TimeoutError):
                while self._connection.connected:
                    self._connection.drain_events(timeout=NOTICE_SECONDS)
            # The probe fails if the connection was lost.
            if not (self._is_blocked and self._connection.connected):
                assert self._producer is not None
                self._probe(self._producer.channel)
        except (ServiceError, *self._failures):
            self._drop()

    def _probe(self, channel: Any) -> None:
        """Publish a message that RabbitMQ drops. RabbitMQ reports an alarm only in answer to a published message."""
        channel.basic_publish(amqp.Message(b""), routing_key=NOWHERE)
        self._published_tag += 1

    def depths(self, names: Iterable[str]) -> dict[str, int | None]:
        """Return the same as the function `depths`, over a new connection; any thread may call this. Raises
        ServiceError.
        """
        connection = self._connection.clone()
        try:
            with opened(connection):
                return depths_on(connection, names)
        except (*self._failures, *MISUNDERSTOOD) as error:
            raise unusable(self._url, error) from error

    def close(self) -> None:
        """Close the connection."""
        with suppress(*self._failures):
            if self._producer is not None and self._has_confirms and not self._is_blocked:
                # py-amqp warns of confirmations that come while it closes.
                self._confirm(0)
        if self._is_blocked:
            self._drop()
        with suppress(*self._failures):
            self._connection.release()
        self._producer = None

    def _drop(self) -> None:
        """Close the connection without notifying the broker, which may not respond."""
        with suppress(*self._failures):
            self._connection.collect()
        self._producer, self._is_blocked = None, False

    def _open(self) -> None:
        try:
            _open(self._connection)
            channel = self._connection.default_channel
            self._producer = kombu.Producer(channel, auto_declare=False, serializer="json")
            self._declared: set[str] = set()
            #: delivery tags of the last published and the last confirmed message (RabbitMQ only)
            self._published_tag = self._confirmed_tag = 0
            self._has_confirms = hasattr(channel, "confirm_select")
            if self._has_confirms:
                channel.confirm_select()
                channel.events["basic_ack"].add(self._on_confirm)
                self._probe(channel)
                while not (self._confirmed_tag or self._is_blocked):
                    self._connection.drain_events(timeout=BROKER_SECONDS)
        except self._failures + MISUNDERSTOOD as error:
            raise unusable(self._url, error) from error

    def _publish(self, batch: list[tuple[str, Payload]]) -> None:
        if self._is_blocked:
            self.look()
        if self._producer is None or self._is_blocked:
            raise ConnectionError("closed or blocked")
        for name in {name for name, _ in batch} - self._declared:
            queue(name)(self._producer.channel).declare()
            self._declared.add(name)
        with self._producer.batch(BATCH):
            for name, payload in batch:
                body, headers, properties = message(payload, self._signer)
                self._producer.publish(
                    body, exchange="", routing_key=name, headers=headers, delivery_mode=2, **properties
                )
                if self._has_confirms:
                    self._published_tag += 1
                    self._confirm(BATCH)
        if self._has_confirms:
            self._confirm(0)

    def _on_confirm(self, delivery_tag: int, multiple: bool) -> None:
        self._confirmed_tag = max(self._confirmed_tag, delivery_tag)

    def _confirm(self, allowed: int) -> None:
        """Wait until at most `allowed` messages are unconfirmed."""
        while self._published_tag - self._confirmed_tag > allowed:
            self._connection.drain_events(timeout=BROKER_SECONDS)
            if self._is_blocked:
                raise ConnectionError("blocked")

    def _on_blocked(self, _: str) -> None:
        self._is_blocked = True

    def _on_unblocked(self) -> None:
        self._is_blocked = False


def unusable(url: str, error: BaseException) -> ServiceError:
    """Return a ServiceError for an error of the broker at `url`, with its remedy."""
    cause = one_line(mask_in(str(error), url)) or type(error).__name__
    # If the variable is not set and the URL is not the default, the URL comes from a celeryconfig.py.
    named = BROKER if os.environ.get(BROKER) or url == DEFAULTS[BROKER] else "broker_url of celeryconfig.py"
    return ServiceError(f"the broker at {mask(url)} cannot be used ({cause}); {remedy(cause, named)}")


def _signed(payload: Mapping[str, Any]) -> str:
    """Return the text that a message's signature covers: the protocol, and the payload as JSON."""
    return f"task {PROTOCOL} {json.dumps(payload, separators=(',', ':'))}"
