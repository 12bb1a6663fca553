"""Weight formats, model architectures and model sources of vllmx."""

__version__ = "0.1.0"
