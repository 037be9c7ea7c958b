"""Control: requests of people and programs to a running study or worker, and the answers to them.

May use: core, store, executors, runner, transport, embedded. The functions find the study or worker in the fleet, or in
this folder's embedded fleets, send a request, wait for the answer for a limited time, and return it as a record. The
scheduler's end is in `session.steering`, that of a worker in `node.heartbeat`. `logs` reads the logs of trials in this
folder, or asks the workers for them.
"""
