"""Several processes that answer requests for one server: `--api-workers`."""
