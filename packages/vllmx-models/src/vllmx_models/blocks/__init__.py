"""What decoder layers are built of: mixers, feed-forwards and norms, each a file of its own."""
