"""Decisions about a gang (pure): its state, what was observed and the time go in, orders and records come out."""
