"""Fleet: the scheduler's side of the queues, one executor for one study.

May use: core to transport. `executor` is the whole; `dispatch` sends, `in_flight` knows what was sent, `workers` who
serves, `lease_monitor` finds what got lost, `circuit_breaker` judges failing workers, `gangs` fills their seats.
Why it is so: classes are discovered from announcements, and a queue's name is its class's name. Publishing is batched
and short trials share a message, for a message costs a worker about a millisecond. Only claimed attempts that were lost
count against a trial.
"""
