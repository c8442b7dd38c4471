"""Samples from files, tables, hubs and object stores."""
