"""Readers and writers of checkpoint files."""
