"""The interface of each place where jobs run, the list of places, and drills of a job wherever it is."""
