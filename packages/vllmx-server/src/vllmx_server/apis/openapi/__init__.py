"""The OpenAPI document, and a page that shows it."""
