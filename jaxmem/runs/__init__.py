"""A run is one folder: who holds it, what it was started with, what happened. Nothing here imports jax."""
