"""Sessions: opening a study, running it on workers, and control of running studies, for the command line and Python.

`opening` opens a study, however it will be run. `session` runs a study on workers; `workers` starts embedded workers,
for a new study even before its file is imported. `steering` carries out requests in the scheduler's process.
`tracking` shows ended trials in other tools. `fetching` copies folders that trials leave, and `cleaning` finds folders
that no study needs.

`control` finds a running study or worker in the fleet, or among this folder's embedded fleets, sends a request and
returns the answer; its `TrialLogs` reads logs of trials. `scaling` decides how many workers to start and which to end.
This room does not print: it gets a function that shows a line, and a view.
"""
