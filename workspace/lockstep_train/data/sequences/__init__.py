"""Token ids as the sequences and batches of a run."""
