"""Shared records and enums: a trial, its attempts and events, messages, machines, clocks, failures.

Every room may use this one; it uses none. Records are frozen and keyword-only. Records that cross a process or a store
are msgspec Structs: they are validated on arrival, and an error names the wrong field.
Why it is so: a fact has one type and one name, so a new field costs one edit at its source and one at its display. Time
is an argument, so the simulator runs the same code on another clock.
"""
