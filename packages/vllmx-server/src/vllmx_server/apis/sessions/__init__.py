"""Sessions that pin KV blocks."""
