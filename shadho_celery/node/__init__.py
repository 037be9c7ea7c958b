"""Node: the worker's side: slots, leases, heartbeat, consumer.

May use: core to transport. `slots` runs what messages bring, `leases` keeps the right to run it, `heartbeat` tells the
schedulers that the worker lives, `consumer` takes messages from Celery.
Why it is so: the Celery worker is thin. Its threads only drive slots, and a slot's process does the work. A worker
claims before it runs, so that a message delivered twice is run once, and runs only modules it was started with.
"""
