"""Fleet: both ends of the protocol between schedulers and workers, and the scheduler's use of the queues.

An attempt is one sending of a trial to a worker. `broker` publishes messages with attempts. `channel` carries events
back through Redis, and `seats` assigns the replicas of distributed trials to workers. `registry` records live workers
and studies. `executor` runs a study's attempts: `dispatch` sends attempts and finds lost ones, and `circuit_breaker`
quarantines failing workers.

The broker only delivers. A worker claims an attempt in Redis before it runs it, and must then renew a lease. The store
is the authority: if Redis loses its data, trials may run again, but no trial is counted twice. Messages are JSON, never
pickle. Each compute class has a queue. A message costs a worker a millisecond, so short trials share messages.
"""
