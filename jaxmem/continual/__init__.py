"""Incremental training: task sequences, what keeps a model from forgetting, and how forgetting is counted."""
