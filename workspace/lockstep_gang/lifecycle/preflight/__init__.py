"""Preflight: its rounds and its judgments (pure)."""
