"""Whole models that families share: decoder, encoder, pooled decoder, and their output heads."""
