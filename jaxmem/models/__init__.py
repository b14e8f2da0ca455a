"""Model architectures: configs without jax, and the Flax modules made from them."""
