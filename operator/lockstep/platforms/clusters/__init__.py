"""A cluster as a whole: what one person sees of it, install, record, remove."""
