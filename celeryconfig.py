"""Every Celery setting of this project, each with its reason.

A `celeryconfig.py` in the working directory of a fleet's worker or scheduler overrides the one that is installed with
the package, setting by setting, but neither what trials depend on (serializers, acknowledgements, queues, the pool,
Celery's own control), which is said, nor a variable that is set here. The names are in lower case; the environment says
what differs between machines:

CELERY_BROKER_URL   where the trials are queued; RabbitMQ, or Redis where that is enough
SHADHO_BROKER_URL   the same, and comes before it: for machines on which it is another application's
SHADHO_REDIS_URL    where workers and schedulers meet, and results come back
SHADHO_IMPORTS      modules whose objectives a worker may run, joined by commas
SHADHO_ACCEPT_CODE                              1 if studies may ship their code to this worker, signed (--code ship)
SHADHO_SIGNING_KEY_FILE                         key that signs messages, results and announcements
SHADHO_ADMINS_FILE                              public keys of the admins, who decide what users may do
SHADHO_USER                                     name of the user who acts
SHADHO_USER_KEY_FILE                            file with the user's own key
SHADHO_ALLOW_UNSIGNED_CONTROL                   1 if requests such as `drain` need no key
SHADHO_REMOTE_CONTROL                           1 if `celery inspect` and `celery control` may reach the workers
SHADHO_IGNORE_CELERYCONFIG                      1 if the working directory's file is another project's, not to be read
SHADHO_TLS_CA                                   certificate of the authority to trust, for amqps:// and rediss://
SHADHO_TLS_CERT, SHADHO_TLS_KEY                 a client's own certificate and its key

`broker_use_ssl` follows from these for a TLS URL, unless it is set here.
"""

import os
from pathlib import Path

from shadho_celery.core.system import (
    BROKER_CONNECT_SECONDS,
    BROKER_HEARTBEAT_SECONDS,
    REDIS_CONNECT_SECONDS,
    REDIS_SECONDS,
)

broker_url = os.environ.get("CELERY_BROKER_URL", "amqp://127.0.0.1")

#: Celery's result backend is not used: a Redis stream returns results ten times as fast.
shadho_redis_url = os.environ.get("SHADHO_REDIS_URL", "redis://127.0.0.1/0")
task_ignore_result = True
result_backend = None

#: A worker runs objectives of these modules only, whatever a message says. In a checkout these are the tasks.
shadho_imports = [name.strip() for name in os.environ.get("SHADHO_IMPORTS", "").split(",") if name.strip()] or sorted(
    f"tasks.{path.stem}" for path in Path("tasks").glob("*.py") if path.stem != "__init__"
)

#: An exception is code that a study ships, signed with the fleet's key: anyone with the key may run anything here.
shadho_accept_code = os.environ.get("SHADHO_ACCEPT_CODE") == "1"

#: The module with the task, for a worker that is started without `-A`.
imports = ["shadho_celery.celery"]

# The broker only delivers; a claim in Redis decides which worker runs an attempt. A message is acknowledged when its
# attempt has ended. If its worker dies before an attempt is claimed, it is delivered again.
task_acks_late = True
task_reject_on_worker_lost = True
task_acks_on_failure = True
task_acks_on_timeout = True

# With late acks, 1 reserves as many messages as there are slots, so that nothing waits behind a long trial.
worker_prefetch_multiplier = 1

# After a lost connection, Celery would take fewer messages until its tasks end, and then raise the number again from
# the task's thread. That thread would wait for RabbitMQ's answer and read from the connection at the same time as the
# consumer's own thread. Each would get half of a frame; the worker would hear nothing more and use all CPU time.
worker_enable_prefetch_count_reduction = False

# Trials run in their own processes; the worker's threads only drive them. Threads answer while a trial runs, and do not
# fork after CUDA was initialised.
worker_pool = "threads"

# Code is never sent: JSON cannot represent it.
task_serializer = "json"
result_serializer = "json"
event_serializer = "json"
accept_content = ["json"]
result_accept_content = ["json"]

# A lost connection must not kill a trial that has run for hours. Its lease is renewed over Redis, not over the broker.
worker_cancel_long_running_tasks_on_connection_loss = False
broker_connection_retry_on_startup = True
broker_connection_max_retries = None
broker_channel_error_retry = True
broker_heartbeat = BROKER_HEARTBEAT_SECONDS
broker_connection_timeout = BROKER_CONNECT_SECONDS

# A running trial's message may stay unacknowledged for days. RabbitMQ's limit for that is in its own file, see deploy/.
if broker_url.startswith("amqp"):
    broker_transport_options: dict[str, object] = {}
else:
    broker_transport_options = {
        # No priorities: one list per queue, with the queue's own name, to which a Redis user can be limited.
        "priority_steps": [0],
        "visibility_timeout": 86400,
        "socket_timeout": REDIS_SECONDS,
        "socket_connect_timeout": REDIS_CONNECT_SECONDS,
        "socket_keepalive": True,
        "health_check_interval": 10,
    }

# The class queues are declared by the workers and schedulers that use them, through one function.
task_create_missing_queues = True

# Workers announce themselves over Redis. Celery's events are for monitoring tools, and are enabled by -E.
worker_send_task_events = False

# Celery's remote control (`shutdown`, `add_consumer`, `revoke`) does not use the signing key: anyone who reaches the
# broker could end every worker. While it is off, a worker has no control queue on RabbitMQ either.
worker_enable_remote_control = os.environ.get("SHADHO_REMOTE_CONTROL") == "1"

# The scheduler's log is the main record. A worker's log should show what is wrong.
worker_hijack_root_logger = True
