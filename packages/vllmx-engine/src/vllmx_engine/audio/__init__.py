"""Audio of requests: files to samples, samples to log-mel frames, and their places in prompts."""
