"""Conformance checks that every method passes."""
