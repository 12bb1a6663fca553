"""The small trained model that vllmx serves when none is named."""

__version__ = "0.1.0"
