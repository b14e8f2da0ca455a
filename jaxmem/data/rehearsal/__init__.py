"""Rows that were trained on before, kept to be trained on again: the buffer, what enters it, and how it is drawn from."""
