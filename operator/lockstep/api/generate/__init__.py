"""CRDs, their schemas and the reference pages, generated from the models."""
