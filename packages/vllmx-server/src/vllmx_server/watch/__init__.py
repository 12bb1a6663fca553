"""Metrics, traces and the log of prompts."""
