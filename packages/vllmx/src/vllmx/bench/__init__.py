"""Measurements behind `vllmx bench`; each returns plain records, the command prints them."""
