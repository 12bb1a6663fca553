"""HTTP: connections, bodies, events, errors, and the description of a route."""
