"""Endpoints, one module for each family."""
