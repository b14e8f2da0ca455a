"""Closed forms of time and memory. No jax."""
