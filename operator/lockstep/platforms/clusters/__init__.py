"""A cluster as a whole: survey, install, record, remove."""
