"""What outlives a request: files, batches, responses and conversations, in SQLite and a folder."""
