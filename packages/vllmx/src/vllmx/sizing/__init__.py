"""What a model needs of a machine and how fast it will be there, before anything is downloaded or
loaded: `vllmx plan`."""
