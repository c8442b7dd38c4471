"""From a file of text to the token batches of each rank."""
