"""Example of a third-party vllmx plugin."""

__version__ = "0.1.0"
