"""Images in prompts: fetched, checked, decoded, made into patches, put into the text."""
