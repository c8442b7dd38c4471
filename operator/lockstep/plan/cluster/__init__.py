"""Facts that one person may see of a cluster, and what follows from them for jobs."""
