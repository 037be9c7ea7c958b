"""The loop: collect what happened, tell those who learn from it, assign classes their turn, fill their queues.

May use: everything up to row 3 (core to executors); knows no queue, worker or command line. `build` puts a scheduler
together from names and settings.
Why it is so: one process owns a study. A trial is recorded before it is sent, so a crash at any point costs at most a
re-run. Queues are kept shallow, so that a decision uses the newest results. A slot never idles while there is a trial
that fits it: what waits in one class's queue is taken back where a slot of another class is free, and where nothing is
left to send, late trials are copied.
"""
