"""Shared records and enums: a trial, its attempts and events, messages, machines, clocks, failures.

Every room may use this one, and it uses no other room. Records are frozen and keyword-only. Records that are sent to
another process or kept in a store are msgspec Structs: they are validated on arrival, and an error names the wrong
field.

A fact has one type and one name, so a new field costs one edit where it is made and one where it is shown. Time is an
argument, so the simulator runs the same code on another clock.
"""
