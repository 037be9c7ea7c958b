"""The loop: collect events, tell those who learn from them, assign classes, fill their queues.

May use: everything up to row 3 (core to executors); knows no queue, worker or command line. `plan` has everything that
follows from a study's settings and space, found once, and makes a scheduler of it.
Why it is so: one process owns a study. A trial is recorded before it is sent, so a crash at any point costs at most a
re-run. Queues are kept shallow, so that a decision uses the newest results. A slot never idles while a trial fits it:
a trial queued for a crowded class is cancelled for a free slot of another class. With nothing left to send, late trials
are copied.
"""
