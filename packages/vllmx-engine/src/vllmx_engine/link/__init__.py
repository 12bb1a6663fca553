"""Processes: how a program reaches an engine core in a process of its own, and watches it."""
