"""Persistence of studies and trials: eight tables that can be queried with SQL, in SQLite or PostgreSQL.

`base` has the protocol of a store. `sql` keeps studies in a database: `rows` has the tables and converts rows, which
are checked when they are read; `engine` connects to the database. `memory` keeps a study in this process.

One scheduler owns a study and is its only writer. Its lock has a fencing number, which every write checks in its own
transaction, so a scheduler that was replaced cannot write. A trial is recorded before it is sent, and one turn of the
loop is one transaction. The store accepts one result per trial.
"""
