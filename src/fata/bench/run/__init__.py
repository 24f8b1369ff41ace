"""Runs cells: on this machine, on Ray, under torchrun."""
