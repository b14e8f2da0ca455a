"""How a step is split: the mechanisms behind the fields of a plan."""
