"""The benchmark: a grid of cells, measured, stored and compared."""
