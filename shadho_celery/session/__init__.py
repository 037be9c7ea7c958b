"""Opening of a study, a run of it on workers, and control of what runs, for the command line and for Python.

`opening` opens a study for every way to run one. `session` runs a study on workers, and `workers` starts those of this
machine, before the file of a new study is imported. `steering` carries out requests at the scheduler's end.

`control` finds a running study or worker, in the fleet or among this folder's embedded fleets, sends a request, waits
for the answer for a limited time, and returns it as a record; `TrialLogs` reads the logs of trials. `scaling` starts
and ends workers as studies want them. The room does not print: it gets a function that shows a line, and a view.
"""
