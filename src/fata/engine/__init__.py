"""The step of a batch: what happens, its state, files of it, rates."""
