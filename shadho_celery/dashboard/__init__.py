"""A web page about the studies of a store: what runs where, how the search goes, and why.

`access` decides who may ask, `cache` keeps the trials of a study as columns, `answers` makes the answers of the pages,
`server` has the routes, and `command` starts it and closes the connections of slow clients. `static` has the
pages: plain scripts without a build step.

Why it is so: the dashboard only reads the store, so it needs no lock and may run anywhere the store can be reached. All
that a trial has written is sent as JSON and shown as text.
"""
