"""Fleet: the protocol between schedulers and workers, both ends of it, and the scheduler's side of the queues.

`broker` publishes messages, `channel` has both ends of the connection for events, `seats` those for gangs; `lua/` has
the scripts of both. `registry` records the live workers and studies. `executor` runs the attempts of one study:
`dispatch` sends them and finds lost ones, `circuit_breaker` quarantines failing workers.

The broker only delivers. A claim in Redis decides which worker runs an attempt, and a lease for how long; the store is
the authority: if Redis loses its data, some trials run again, but no trial is counted twice. Messages are JSON, never
pickle, and a record that does not match its declaration is refused. Classes are discovered from announcements, and a
queue has the name of its class. Short trials share a message, which costs a worker a millisecond.
"""
