"""Verbs about a job."""
