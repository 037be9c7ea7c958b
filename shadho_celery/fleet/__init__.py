"""Fleet: the scheduler's side of the queues, one executor for one study.

May use: core to transport. `executor` is the whole; `dispatch` sends attempts, `in_flight` records them,
`lease_monitor` finds lost ones, `workers` records the live workers, `circuit_breaker` judges failing ones, `gangs`
fills the seats of gangs, and `removal` ends the trials of a deleted study.
Why it is so: classes are discovered from announcements, and a queue's name is its class's name. A machine has a queue
for each class, too, for attempts that are to run there. Publishing is batched and short trials share a message, which
costs a worker about a millisecond. Only claimed attempts that were lost count against a trial.
"""
