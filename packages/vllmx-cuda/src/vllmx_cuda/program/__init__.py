"""The recorded step on the device: planned, lowered, staged, captured and replayed."""
