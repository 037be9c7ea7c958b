"""Broker check: test, before a worker starts, whether the broker lets it consume its queue.

Celery connects again and again, which is right while a broker is away, but hides the reason of a permanent refusal.
"""

from __future__ import annotations

from typing import Any

import kombu.exceptions

from shadho_celery.core.checks import one_line
from shadho_celery.errors import ServiceError
from shadho_celery.transport.broker import queue
from shadho_celery.transport.tls import is_untrusted, remedy
from shadho_celery.transport.urls import BROKER, mask

#: AMQP's codes of permanent refusals: access refused, not allowed
_CODES = (403, 530)

#: Redis' words for them
_WORDS = ("WRONGPASS", "NOPERM", "NOAUTH", "invalid username-password", "Authentication required", "no permissions")


def check_access(connection: Any, name: str) -> None:
    """Raise ServiceError if the broker refuses the connection, or refuses to let it consume the queue `name`.

    A broker that does not answer may still come: Celery waits for it. `connection` is Celery's, not yet open; it is
    closed afterwards.
    """
    try:
        with connection:
            connection.connect()
            channel = connection.default_channel
            queue(name)(channel).declare()
            if connection.transport.driver_type == "amqp":
                # Needs the same permission as consuming. A message that it gets goes back when the channel closes.
                channel.basic_get(name)
    except (*connection.connection_errors, *connection.channel_errors, kombu.exceptions.KombuError, OSError) as error:
        if is_untrusted(error) or _is_final(error):
            raise ServiceError(_text(connection.as_uri(), name, error)) from error


def _is_final(error: BaseException) -> bool:
    return getattr(error, "code", None) in _CODES or any(words in str(error) for words in _WORDS)


def _text(uri: str, name: str, error: BaseException) -> str:
    cause = one_line(error)
    if is_untrusted(error):
        return f"the broker at {mask(uri)} cannot be used ({cause}); {remedy(cause, BROKER)}"
    return (
        f"the broker at {mask(uri)} does not let this worker serve {name} ({cause}); "
        "check user and password in CELERY_BROKER_URL, and the user's permissions"
    )
