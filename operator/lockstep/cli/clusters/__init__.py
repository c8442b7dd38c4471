"""Verbs about a cluster."""
