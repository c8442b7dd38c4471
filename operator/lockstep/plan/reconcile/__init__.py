"""What the operator does next about one job."""
