"""Who may use the server: keys, what their holders may do, and how much of it."""
