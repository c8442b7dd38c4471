"""Errors that are the reader's to fix."""

from __future__ import annotations


class ConfigError(Exception):
    """What was written can't be used. The message says where, what is valid and what to do; the command line exits with 2."""
