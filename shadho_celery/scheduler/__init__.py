"""The loop: collect events, let models and samplers learn from them, assign classes, fill their queues.

May use: everything up to row 3 (core to executors); knows no queue, worker or command line. `plan` computes everything
that follows from a study's settings and space, and creates the scheduler from it.
Why it is so: one process owns a study. A trial is recorded before it is sent, so a crash at any point costs at most a
re-run. Queues are kept shallow, so that a decision uses the newest results. A slot never idles while a trial fits it:
a trial queued for a crowded class is cancelled for a free slot of another class. With nothing left to send, late trials
are copied.
"""
