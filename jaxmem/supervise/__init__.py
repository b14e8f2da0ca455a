"""Keeping a run going: its processes, who takes part, and when to start again. Nothing here imports jax."""
