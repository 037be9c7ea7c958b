"""Time limits of every call to a server: the broker, Redis, and the database of the store.

A server may hang without closing its connections: it is out of memory or disk, it was stopped, a network drops its
packets, or another session holds a lock. Each call waits at most the seconds given here. It then fails as if the server
were down: a running study and its workers warn, wait, and try again.

A scheduler renews its locks at least every five seconds while its calls return, and its lock on Redis lasts for twenty
(`transport.channel.HOLD_SECONDS`). No single call of a scheduler may therefore take more than ten.
"""

from __future__ import annotations

#: broker: opening of a connection, and each step of its handshake
BROKER_CONNECT_SECONDS = 3.0

#: broker: each answer to the scheduler, to `status`, and to a worker that checks its queues for messages
BROKER_SECONDS = 5.0

#: broker: half of the seconds of silence after which a worker closes its connection to RabbitMQ and opens another
BROKER_HEARTBEAT_SECONDS = 30.0

#: broker: an answer of rabbitmqctl to `doctor`; starting Erlang takes it some seconds
RABBITMQCTL_SECONDS = 20.0

#: Redis: opening of a connection; and each answer to a command that a person waits for
REDIS_CONNECT_SECONDS = 3.0

#: Redis: each other answer, and also those to Celery if Redis is the broker
REDIS_SECONDS = 10.0

#: PostgreSQL: opening of a connection
DATABASE_CONNECT_SECONDS = 5

#: PostgreSQL: wait of a statement for each lock (`lock_timeout`)
LOCK_WAIT_SECONDS = 4.0

#: PostgreSQL: each statement of a scheduler and of a reader, after which the server cancels it (`statement_timeout`)
STATEMENT_SECONDS, READ_SECONDS = 8.0, 30.0

#: PostgreSQL: each statement that deletes or copies a whole study, while the study does not run
MAINTENANCE_SECONDS = 3600.0

#: PostgreSQL: seconds that a client waits beyond a statement's limit before it closes the connection to a silent server
GRACE_SECONDS = 2.0

#: PostgreSQL: idle time of a client within a transaction, which locks the study's row for other clients
#: (`idle_in_transaction_session_timeout`)
IDLE_SECONDS = 20.0

#: SQLite: wait for a file that another program has locked
LOCKED_SECONDS = 8.0
