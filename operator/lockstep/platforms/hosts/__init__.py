"""A job on machines that are reached over ssh: no root, no daemon, no ssh between them."""
