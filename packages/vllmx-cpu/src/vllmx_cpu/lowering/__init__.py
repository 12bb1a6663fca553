"""Ops lowered to native functions, one module for each family."""
