"""Checkpoints: written while training goes on, committed whole, verified when read."""
