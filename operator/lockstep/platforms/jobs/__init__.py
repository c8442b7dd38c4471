"""Work of the verbs on a job of a cluster."""
