"""Decisions of Lockstep, as pure functions: no cluster, no clock, no files."""
