"""The paper's numbers and experiments."""
