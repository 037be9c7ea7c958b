"""Ranks of a process group: their processes on this machine, how they find one another, and how they notice an end."""
