"""Meta-training: how the numbers of a learned optimizer are found, on small problems."""
