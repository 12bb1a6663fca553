"""What outlives a request: files, batches and responses, in SQLite and a folder."""
