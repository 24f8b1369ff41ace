"""Watches a stream for collapse, and falls back to the source model."""
