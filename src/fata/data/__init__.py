"""Data sets, and the order in which a model meets them."""
