"""The GPU: memory, copies, launches, products, and what the driver says."""
