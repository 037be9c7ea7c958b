"""Fleet: both ends of the protocol between schedulers and workers, and the scheduler's use of the queues.

`broker` publishes messages. `channel` has both ends of the channel for events, `seats` both ends for seats of gangs,
and `lua/` their Redis scripts. `registry` records live workers and studies. `executor` runs the attempts of a study:
`dispatch` sends them and finds lost ones, `circuit_breaker` quarantines failing workers.

The broker only delivers. A claim in Redis decides which worker runs an attempt, and a lease how long it may run without
renewal. The store is the authority: if Redis loses its data, trials may run again, but no trial is counted twice.
Messages are JSON, never pickle; a record that does not match its declaration is refused. Workers announce their compute
class, and a queue has the name of its class. A message takes about a millisecond, so short trials share messages.
"""
