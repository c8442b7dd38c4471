"""Options, the cluster that is meant, and output: shared by verbs."""
