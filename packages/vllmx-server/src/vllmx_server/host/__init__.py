"""Processes, workers and models of a server, which hosts APIs and knows none by name."""
