"""Weights on their way to the device, and the measuring that a load does."""
