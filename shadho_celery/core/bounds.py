"""Time limits of every call to a server: the broker, Redis, and the database of the store.

A server may hang without closing its connections: it is out of memory or disk, it was stopped, a network drops its
packets, or another session holds a lock. No call waits longer than the seconds given here. After that it fails as if
the server were down: a running study and its workers warn, wait, and try again.

A scheduler renews its locks at least every five seconds while its calls return, and its lock on Redis lasts for twenty
(`transport.channel.HOLD_SECONDS`). No single call of a scheduler may therefore take more than ten.
"""

from __future__ import annotations

#: broker: a new connection, and each step of its handshake
BROKER_CONNECT_SECONDS = 3.0

#: broker: each answer to the scheduler, to `status`, and to a worker that checks its queues for messages
BROKER_SECONDS = 5.0

#: broker: the deletion of refused messages at the end of a study, and by `rm`; workers delete the rest
REMOVAL_SECONDS = 3.0

#: broker, a worker's own connection to RabbitMQ: half of the silence after which it is closed and opened again
BROKER_HEARTBEAT_SECONDS = 30.0

#: Redis: a new connection; and each answer to a command that a person waits for
REDIS_CONNECT_SECONDS = 3.0

#: Redis: each answer, also to Celery if Redis is the broker
REDIS_SECONDS = 10.0

#: PostgreSQL: a new connection
DATABASE_CONNECT_SECONDS = 5

#: PostgreSQL: each lock that a statement waits for (`lock_timeout`)
LOCK_WAIT_SECONDS = 4.0

#: PostgreSQL: each statement, after which the server cancels it (`statement_timeout`); a reader's may be longer
STATEMENT_SECONDS, READ_SECONDS = 8.0, 30.0

#: PostgreSQL: each statement that deletes or copies a whole study, while nothing else runs
MAINTENANCE_SECONDS = 3600.0

#: PostgreSQL: seconds beyond those of a statement after which the connection to a silent server is closed
GRACE_SECONDS = 2.0

#: PostgreSQL: a transaction in which a client does nothing and keeps others from the study's row
#: (`idle_in_transaction_session_timeout`)
IDLE_SECONDS = 20.0

#: SQLite: seconds that another program may keep the file locked
LOCKED_SECONDS = 8.0
