"""The recorded step: a model's forward pass as a list of ops, its passes and its buffers."""
