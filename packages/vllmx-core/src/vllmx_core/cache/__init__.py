"""KV cache groups, recurrent states, and how much of them fits in memory."""
