"""Weight formats, model architectures and model sources of vllmx."""
