"""The loop of a study: collect events, learn from them, update the classes, and send trials to their queues.

`scheduler` has the loop. `proposals` proposes new trials, and `known_points` adds those of users. The loop knows no
queues or workers: it submits attempts to an executor (`executors`), which returns events. `plan` makes the scheduler
from settings and space. `wishes` computes the slots that the study wants.

One process owns a study. A trial is recorded before it is sent, so after a crash at most the trial is run again. Queues
are short, so that decisions use the newest results. No slot is idle while a trial fits it.
"""
