"""This node's part of a dev environment."""
