"""Records and settings that the whole package shares: trials, attempts, events, messages, machines, clocks, failures.

All other packages may import this one, and it imports none of them. Records are frozen and keyword-only. Records that
are sent to another process or kept in a store are msgspec Structs: they are validated when they are read, and an error
names the invalid field.

A fact has one type and one name, so a new fact is declared in one place. Time is an argument, so the simulator runs the
same code on another clock.
"""
