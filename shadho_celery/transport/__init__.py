"""Transport: the way of attempts to workers, and of events back: broker, Redis channel, signing, TLS.

May use: core (and the rooms before runner). `broker` publishes messages, `channel` has both ends of the way back,
`seats` those of gangs, `lua/` their scripts (`finish_and_claim` above all), `quarantine` the workers that get no
trials, `registry` the live workers and studies, `redis_queues` what a worker needs where Redis is the broker,
`refused_messages` drops those of ended studies in bulk.
Why it is so: the broker only delivers. A claim in Redis decides which worker runs an attempt, a lease for how long, and
one script takes its result. Redis is the gate, the store the authority: losing Redis costs a re-run, never a double
count. JSON on the wire, never pickle; a record that does not fit its declaration is refused and counted.
"""
