"""Reasons why pods of a job don't run yet."""
