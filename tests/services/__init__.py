"""Real Redis, RabbitMQ and PostgreSQL for the tests.

Each is looked for in this order: a URL in the environment (SHADHO_TEST_REDIS_URL, SHADHO_TEST_AMQP_URL,
SHADHO_TEST_POSTGRES_URL); a server on its standard port of 127.0.0.1, as deploy/compose.yml starts them; the system's
own programs, started as private processes on free ports. Where none is found the test is skipped, and fails where
CI=true. Of a shared Redis each test is lent a database; where all are in use, a private Redis is started, unless the
environment names the server.

Private servers keep everything in one temporary folder each, and are children of the test session.
"""

from __future__ import annotations

from services.lending import (
    TEST_DBS,
    amqp_service,
    amqp_vhost,
    postgres_database,
    postgres_service,
    private,
    redis_db,
    redis_service,
    service,
)
from services.processes import (
    MARK,
    PATIENCE,
    Server,
    Unavailable,
    free_port,
    marked_processes,
    nothing_left_behind,
    wait_until,
)
from services.servers import (
    COMPOSE,
    PostgresServer,
    RabbitServer,
    RedisServer,
    TlsRabbitServer,
    TlsRedisServer,
    amqp_answers,
    certificates,
    postgres_answers,
    redis_answers,
    system_rabbitmqctl,
)

__all__ = [
    "COMPOSE",
    "MARK",
    "PATIENCE",
    "TEST_DBS",
    "PostgresServer",
    "RabbitServer",
    "RedisServer",
    "Server",
    "TlsRabbitServer",
    "TlsRedisServer",
    "Unavailable",
    "amqp_answers",
    "amqp_service",
    "amqp_vhost",
    "certificates",
    "free_port",
    "marked_processes",
    "nothing_left_behind",
    "postgres_answers",
    "postgres_database",
    "postgres_service",
    "private",
    "redis_answers",
    "redis_db",
    "redis_service",
    "service",
    "system_rabbitmqctl",
    "wait_until",
]
