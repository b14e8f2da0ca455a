"""Optimizers: configs without jax, and the optax transforms made from them."""
