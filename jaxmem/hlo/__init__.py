"""Readers of optimized HLO: text in, numbers out, no jax."""
