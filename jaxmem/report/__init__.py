"""Reports of a check: terminal, HTML and the difference of two. They read the object of `jaxmem/check.schema.json` and nothing else."""
