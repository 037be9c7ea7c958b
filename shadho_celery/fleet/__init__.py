"""Fleet: the scheduler's side of the queues, with one executor per study.

May use: core to transport. `executor` uses all other modules. `dispatch` sends attempts, `lease_monitor` finds
lost ones, `workers` records the live workers, `circuit_breaker` quarantines failing ones, `gangs` fills the seats of
gangs. The live attempts are the study's (`core.attempts`).

Classes are discovered from announcements, and a queue has the name of its class. Each machine also has a queue per
class, for attempts that must run on that machine. Publishing is batched, and short trials share a message, because a
message costs a worker about a millisecond. Only lost attempts that were claimed count against a trial.
"""
