"""Data that outlives a request: files, batches, responses, in SQLite and a folder."""
