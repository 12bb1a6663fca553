"""The plugin registry: hooks, specs, and the choice between providers."""
