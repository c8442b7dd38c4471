"""What verbs do with a job on a cluster."""
