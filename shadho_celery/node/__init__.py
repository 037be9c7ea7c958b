"""Node: the worker's side: slots, leases, heartbeat, consumer.

May use: core to transport. `slots` runs the attempts of messages, `bundle` claims and finishes those of one message,
`leases` renews the right to run them each second, `heartbeat` announces the worker to the schedulers, `consumer` pauses
and resumes the messages from Celery, `shutdown` ends the worker at a signal, `logs` answers requests for a trial's log
and logs one line a trial, `worker_lines` those about the worker.
Why it is so: the Celery worker is thin. Its threads only drive slots, and a slot's process does the work. A worker
claims an attempt before it runs it, so that a message delivered twice is run once. It runs only objectives of modules
that it was started with.
"""
