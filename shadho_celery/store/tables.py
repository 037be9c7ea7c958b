"""The three tables of the store.

A column of `trials` has the name of a field of a trial or of its outcome: `sql` needs no second list.
"""

from __future__ import annotations

import sqlalchemy as sa

#: type of JSON columns; not PostgreSQL's JSONB, which reorders keys, makes an int of 1e22 and refuses NUL characters
json = sa.JSON()
schema = sa.MetaData()

studies = sa.Table(
    "studies",
    schema,
    sa.Column("key", sa.String(32), primary_key=True),
    sa.Column("name", sa.String(255), nullable=False, unique=True),
    sa.Column("module", sa.String(255), nullable=False, index=True),
    sa.Column("seed", sa.BigInteger, nullable=False),
    #: label -> its domain and condition, to detect a space that has changed
    sa.Column("space", json, nullable=False),
    sa.Column("created_at", sa.Float, nullable=False),
    #: options that its command lines have given so far
    sa.Column("settings", json),
    sa.Column("holder", sa.String(255)),
    sa.Column("lock_expires", sa.Float),
    sa.Column("fence", sa.BigInteger, nullable=False, default=0),
)

trials = sa.Table(
    "trials",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("subspace", sa.Text, nullable=False),
    sa.Column("params", json, nullable=False),
    sa.Column("seed", sa.BigInteger, nullable=False),
    sa.Column("state", sa.String(16), nullable=False),
    sa.Column("attempt", sa.Integer, nullable=False),
    sa.Column("lost", sa.Integer, nullable=False),
    sa.Column("compute_class", sa.String(255)),
    sa.Column("loss", sa.Float),
    sa.Column("metrics", json, nullable=False),
    sa.Column("error", sa.Text),
    sa.Column("host", sa.String(255)),
    sa.Column("asked_at", sa.Float),
    sa.Column("started_at", sa.Float),
    sa.Column("finished_at", sa.Float),
    sa.Column("seconds", sa.Float),
    #: bytes, at the trial's peak
    sa.Column("memory", sa.BigInteger),
    sa.Column("budget", sa.Float),
    #: slots that it takes; null for one
    sa.Column("slots", sa.Integer),
    sa.Column("rung", sa.Integer),
    #: number of the trial whose params, seed and checkpoints it carries on
    sa.Column("origin", sa.Integer),
    #: compute classes that it ran out of memory on, joined by commas
    sa.Column("outgrown", sa.Text),
    sa.Column("warning", sa.Text),
    #: the live attempts of a trial that was copied: number, state, class, host and moment of the start of each
    sa.Column("live", sa.JSON(none_as_null=True)),
)

reports = sa.Table(
    "reports",
    schema,
    sa.Column("study", sa.String(32), sa.ForeignKey("studies.key"), primary_key=True),
    sa.Column("number", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("attempt", sa.Integer, primary_key=True, autoincrement=False),
    sa.Column("step", sa.BigInteger, primary_key=True, autoincrement=False),
    #: null for NaN, which SQLite cannot keep
    sa.Column("loss", sa.Float),
    sa.Column("at", sa.Float, nullable=False),
)


def add_columns(engine: sa.Engine) -> None:
    """Add the nullable columns that the database of an earlier version lacks; its rows have null in them.

    Raises sqlalchemy's DBAPIError if another process has added one meanwhile; a second call continues.
    """
    found = sa.inspect(engine)
    for table in schema.sorted_tables:
        existing = {column["name"] for column in found.get_columns(table.name)}
        for column in table.columns:
            if column.nullable and column.name not in existing:
                definition = sa.schema.CreateColumn(column).compile(engine)
                with engine.begin() as connection:
                    connection.execute(sa.text(f"ALTER TABLE {table.name} ADD COLUMN {definition}"))
