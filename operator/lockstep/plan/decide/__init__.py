"""Single decisions about a job's life: accept, start, stop, retry, replace a lost node, place the gang."""
