"""Messages between clients and the engine core, and their transport."""
