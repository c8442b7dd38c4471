"""Files in a job's volumes and pods."""
