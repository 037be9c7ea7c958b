"""Shared records and enums: a trial, its attempts and events, messages, machines, clocks, failures.

Every room may use this one; it uses none. Records are frozen and keyword-only. Those that cross a process or a store
are msgspec Structs: they are checked where they come in, and the field that is wrong is named.
Why it is so: a fact has one type and one name, so that a new field costs one edit where it is made and one where it is
shown. Time is an argument, so that the simulator runs the same code on another clock.
"""
