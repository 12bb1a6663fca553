"""Brings requests from the listening socket to the application: connections, their limits and their
end.

hypercorn parses and frames; who is let in, how long an unfinished request may take and when a
descriptor is given back is decided here, on top of parts of hypercorn that are not its public API.
"""
