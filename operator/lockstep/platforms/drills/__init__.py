"""Faults done to a running job on purpose, and how soon it is well again."""
