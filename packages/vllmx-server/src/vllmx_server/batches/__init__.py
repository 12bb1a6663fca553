"""Batches: input files whose lines are answered when nobody else needs the engine."""
