"""Transport: how attempts get to workers and events back: broker, Redis channel, signing, TLS.

May use: core (and the rooms before runner). `broker` publishes messages, `channel` has both ends of the way back with
its scripts in `lua/`, `seats` those of gangs, `quarantine` the workers that get no trials, `registry` who is alive.
Why it is so: the broker only delivers. A claim in Redis decides who runs an attempt, a lease for how long, and one
script takes its result. Redis is the gate, the store the authority: losing Redis costs a re-run, never a double count.
JSON on the wire, never pickle; what comes in is a declared record, or is refused and counted.
"""
