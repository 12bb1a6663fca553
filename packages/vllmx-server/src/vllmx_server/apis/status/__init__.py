"""Models, health, metrics, usage of keys, version."""
