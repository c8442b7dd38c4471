"""What one person may see of a cluster, and what follows from it for jobs."""
