"""Node: the worker's side of the queues: slots, leases, heartbeat, consumer.

`slots` runs the attempts of messages, on the slots of `devices`. `claims` claims and finishes the attempts of one
message. `leases` renews the leases of running attempts each second. `heartbeat` announces the worker to the schedulers.
`consumer` pauses and resumes the messages from Celery. `shutdown` ends the worker at a signal. `logs` answers requests
for a trial's log, and writes lines about trials and about the worker to the worker's log.

The Celery worker does little itself: its threads drive the slots, and each slot's process runs the trials. A worker
claims an attempt before it runs it, so a message that is delivered twice runs once. It runs only objectives of modules
that it was started with, or code that studies ship to it if it accepts that.
"""
