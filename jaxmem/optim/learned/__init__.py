"""Learned optimizers: update rules that are small networks, as optax transformations."""
