"""Node: the worker's side of the queues: slots, leases, heartbeat, consumer.

May use: core to transport. `slots` runs the attempts of messages. `bundle` claims and finishes the attempts of one
message. `leases` renews the leases of running attempts each second. `heartbeat` announces the worker to the schedulers.
`consumer` pauses and resumes the messages from Celery. `shutdown` ends the worker at a signal. `logs` answers requests
for a trial's log, and logs one line per trial and lines about the worker.

The Celery worker does little itself: its threads drive slots, and each slot's process does the work. A worker claims an
attempt before running it, so a message that is delivered twice runs once. It runs only objectives of modules that it
was started with.
"""
