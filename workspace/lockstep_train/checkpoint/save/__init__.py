"""Saves: snapshot, shards, commit, upkeep."""
