"""Data of a run, from files of text to the token batches of each rank."""
