"""Charts of a study as declared data, and the pages that draw them: report, notebooks, and parts of the dashboard.

Each chart is a function from columns to a `Chart`, which has no code and no markup. The functions are in `losses`,
`machines`, `params` and `timeline`, and register themselves in `registry` by the decorator `StudyChart`. `study`
imports them, sorts the charts of pages, and reads a study for them. `columns` has the trials and attempts of a study as
columns. `explained` and `params` measure how much labels explain. `payload` writes charts as JSON of a limited size.
`report` makes an HTML file and `notebook` makes frames, which need no network; `static` has their scripts, without a
build step.

What a chart shows is decided in Python, so it is tested without a browser. A chart has at most `chart.MOST` marks, and
its note says by which rule marks were joined or left out. Text that a trial wrote is never read as HTML: Python makes
HTML only with `report.element`, which escapes text, and the scripts only set text nodes and draw on canvases.
"""
