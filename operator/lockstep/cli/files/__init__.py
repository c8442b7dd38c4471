"""Verbs about a job's files, checkpoints and editors."""
