"""Dashboard: web pages about the studies of a store: what runs where, how the search progresses, and why.

`access` decides which requests are allowed, `cache` keeps the trials of a study as columns, and `answers` computes the
content of the pages. `server` has the routes; `command` starts the server and closes the connections of slow clients.
`static` has the pages, as plain scripts without a build step.

The dashboard only reads the store, so it needs no lock and may run on any machine that can reach the store. Texts that
come from a trial are sent as JSON and shown as plain text.
"""
