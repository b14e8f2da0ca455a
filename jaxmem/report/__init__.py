"""Reports of a check: terminal, HTML, and the difference of two. They read the object of `check.schema.json` and nothing else."""
