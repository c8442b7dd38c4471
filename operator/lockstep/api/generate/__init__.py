"""What is generated from the models: CRDs, their schemas and the reference pages."""
