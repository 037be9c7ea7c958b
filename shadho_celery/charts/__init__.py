"""Charts of a study as declared data: each is a function from columns to a `Chart`, which has no code and no markup.

May use: core, space, store, objective, predictors, study, placement, results. `chart` has the records, `columns` reads
a study's trials, and the other modules each have the charts of one subject: `losses`, `params`, `rungs`, `fronts`,
`failures`, `machines` and `timeline`. A chart is one function with the decorator `registry.StudyChart`, which says
where pages show it and how much of the trials it needs; `study` has all of them by name. `explained`, `additive` and
`param_seconds` compute how much labels matter. The dashboard, the report and notebooks all draw these records.

Why it is so: what is shown is decided once and tested without a browser. A chart has at most `chart.MOST` marks,
whatever the size of the study, and says by which rule marks were joined or left out.
"""
