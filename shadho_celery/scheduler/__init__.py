"""The loop: collect events, let models and samplers learn from them, assign classes, fill their queues.

The room knows no queue, worker or command line: it submits attempts to an executor (`executors`) and polls events.
`plan` computes everything that follows from a study's settings and space, and creates the scheduler from it.

One process owns a study. A trial is recorded before it is sent, so a crash at any point costs at most a re-run. Queues
are kept shallow, so that a decision uses the newest results. A slot never idles while a trial fits it: a trial queued
for a crowded class is cancelled for a free slot of another. With nothing left to send, late trials are copied.
"""
