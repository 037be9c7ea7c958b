"""Transport of attempts to workers and of events back: broker, Redis channel, signing, TLS.

May use: core (and the rooms before runner). `broker` publishes messages. `channel` has both ends of the connection for
events, and `seats` both ends for gangs. Their scripts are in `lua/`, above all `finish_and_claim`. `quarantine` keeps
the workers that get no trials, and `registry` the live workers and studies. `redis_queues` is used by a worker if Redis
is the broker. `refused_messages` deletes messages of ended studies in bulk.

The broker only delivers messages. A claim in Redis decides which worker runs an attempt, a lease decides for how long,
and one script accepts its result. Redis decides which attempt may run, but the store is the authority: if Redis loses
its data, trials run again, but none is counted twice. Messages are JSON, never pickle. A record that does not match its
declaration is refused and counted.
"""
