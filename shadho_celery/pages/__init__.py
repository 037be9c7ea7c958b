"""Charts in a browser: what the report, notebooks and a dashboard show of a study, and the scripts that draw it.

May use: core, space, store, objective, predictors, study, placement, results, charts. `reading` reads a study once,
`figures` says which charts are shown in which order, `payload` writes them as JSON of a limited size. `summary` and
`advice` say in words what the charts show. `document` makes HTML files that need nothing else, `report` and `notebook`
are such documents. `static` has the scripts, which are plain modules without a build step.
Why it is so: what a trial wrote is text everywhere. Python writes HTML through `document.element` alone, and the
scripts only set text nodes and draw on canvases.
"""
