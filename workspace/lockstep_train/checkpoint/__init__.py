"""Sharded checkpoints without collectives: snapshot, write, commit; and the way back."""
