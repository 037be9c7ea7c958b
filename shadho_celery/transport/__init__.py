"""Transport of attempts to workers and of events back: broker, Redis channel, signing, TLS.

May use: core (and the rooms before runner). `broker` publishes messages. `channel` has both ends of the connection for
events, `seats` those for gangs; `lua/` has the scripts of both. `registry` records the live workers and studies.
`redis_queues` is for Redis as the broker.

The broker only delivers messages. A claim in Redis decides which worker runs an attempt, and a lease for how long. The
store is the authority: if Redis loses its data, some trials run again, but no trial is counted twice.
Messages are JSON, never pickle. A record that does not match its declaration is refused and counted.
"""
