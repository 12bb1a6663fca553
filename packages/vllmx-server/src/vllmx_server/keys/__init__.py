"""Keys for the server: what their holders may do, and how much of it."""
