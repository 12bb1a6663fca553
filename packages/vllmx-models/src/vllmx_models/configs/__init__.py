"""Typed access to config.json."""
