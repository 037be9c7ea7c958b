"""Persistence of studies and trials: four tables that a person can query, in SQLite or PostgreSQL.

May use: core. `base` is the role, `sql` the database, `memory` a store for searches that end with their process.
Why it is so: one scheduler owns a study and is its only writer. Its lock has a fencing number that every write checks
in its own transaction, so that a scheduler which was replaced cannot write. A trial is recorded before it is sent,
and one turn of the loop is one transaction. The store is the authority: it takes one result a trial. What is read is
checked: a row that is no trial is named, and `repair` moves it away.
"""
