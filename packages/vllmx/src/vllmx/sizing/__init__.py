"""Estimates what a model needs and how fast it runs on a machine before anything is downloaded or
loaded: `vllmx plan`."""
