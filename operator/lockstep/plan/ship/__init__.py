"""What a deployment sends, and images."""
