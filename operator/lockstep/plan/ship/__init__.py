"""Deployments, and images to build for them."""
