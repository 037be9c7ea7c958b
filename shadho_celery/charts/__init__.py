"""Charts of a study as declared data, and the pages that draw them: report, notebooks, and parts of the dashboard.

Each chart is a function from columns to a `Chart`, which has no code and no markup. `columns` reads a study's trials,
`study` lists the charts in the order in which they are shown, `payload` writes them as JSON of a limited size. `report`
and `notebook` are HTML files that need nothing else; `static` has their scripts, without a build step.

What is shown is decided once and tested without a browser. A chart has at most `chart.MOST` marks, and says by which
rule marks were joined or left out. What a trial wrote is text everywhere: Python writes HTML through `element` alone,
and the scripts only set text nodes and draw on canvases.
"""
