"""Fleet: both ends of the protocol between schedulers and workers, and the scheduler's use of the queues.

`broker` publishes messages. `channel` has both ends of the channel for events, `seats` both ends for the seats of
gangs; `lua/` has the Redis scripts of these two modules. `registry` records the live workers and studies. `executor`
runs the attempts of one study: `dispatch` sends them and finds lost ones, `circuit_breaker` quarantines failing
workers.

The broker only delivers. A claim in Redis decides which worker runs an attempt, and a lease how long it may run without
renewal. The store is the authority: if Redis loses its data, trials may run again, but no trial is counted twice.
Messages are JSON, never pickle, and a record that does not match its declaration is refused. Compute classes are
discovered from the workers' announcements, and a queue has the name of its class. A message costs a worker about a
millisecond, so short trials share messages.
"""
