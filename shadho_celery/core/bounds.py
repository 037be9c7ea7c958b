"""Bounds in time of every call to a server: the broker, Redis, and the database of the store.

A server may stand still without closing its connections: it is out of memory or disk, it was stopped, a network drops
its packets, or another session holds a lock. No call waits for it longer than the seconds given here. The call then
fails as it does when the server is away: a running study and its workers warn, wait, and try again.

A scheduler renews its locks at least every five seconds while its calls return, and the lock on Redis lasts for twenty
(`transport.channel.HOLD_SECONDS`). So no single call of a scheduler takes more than ten.
"""

from __future__ import annotations

#: broker: a new connection, and each step of its handshake
BROKER_CONNECT_SECONDS = 3.0

#: broker: each answer to the scheduler, to `status`, and to a worker that looks for messages in its queues
BROKER_SECONDS = 5.0

#: broker: the removal of refused messages at the end of a study, and by `rm`; workers drop what is left
REMOVAL_SECONDS = 3.0

#: broker, a worker's own connection to RabbitMQ: half of the silence after which it is given up, and made again
BROKER_HEARTBEAT_SECONDS = 30.0

#: Redis: a new connection; and each answer to a command that a person waits for
REDIS_CONNECT_SECONDS = 3.0

#: Redis: each answer, also to Celery where Redis is the broker
REDIS_SECONDS = 10.0

#: PostgreSQL: a new connection
DATABASE_CONNECT_SECONDS = 5

#: PostgreSQL: each lock that a statement waits for (`lock_timeout`)
LOCK_WAIT_SECONDS = 4.0

#: PostgreSQL: each statement, which the server cancels then (`statement_timeout`); a reader's may be long
STATEMENT_SECONDS, READ_SECONDS = 8.0, 30.0

#: PostgreSQL: each statement that deletes or copies a whole study, while nothing else runs
MAINTENANCE_SECONDS = 3600.0

#: PostgreSQL: seconds beyond those of a statement after which a server that has not answered is cut off
GRACE_SECONDS = 2.0

#: PostgreSQL: a transaction in which a client stands still, and keeps others from the study's row
#: (`idle_in_transaction_session_timeout`)
IDLE_SECONDS = 20.0

#: SQLite: seconds that another program may keep the file locked
LOCKED_SECONDS = 8.0
