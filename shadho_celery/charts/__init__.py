"""Charts of a study as declared data, and the pages that draw them: report, notebooks, and parts of the dashboard.

A chart is made by a function that gets columns and returns a `Chart`: data without code or markup. The decorator
`StudyChart` registers the functions of `losses`, `machines`, `params` and `timeline` in `registry`. `study` sorts the
charts and writes them as JSON of a limited size. `columns` reads trials and attempts. `report` makes HTML for files and
notebooks, which needs no network. `static` has the scripts, without a build step.

A chart has at most `chart.MOST` marks, and its note says by which rule marks were joined or left out. Text of a trial
is never read as HTML: Python uses only `report.element`, and the scripts only set text nodes and draw on canvases.
"""
