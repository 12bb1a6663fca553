"""What families share as a whole: decoder, encoder, pooled decoder, and their output heads."""
