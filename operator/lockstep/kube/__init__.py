"""A small client of the Kubernetes API. It knows Kubernetes and nothing of jobs' plans."""
