"""Limits of requests: keys and what they may use, requests in flight, memory of bodies."""
