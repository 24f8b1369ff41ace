"""Ranks that share every batch."""
