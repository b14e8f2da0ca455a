"""Starts `jaxmem train` somewhere: `python -m launch.local|slurm|gke|tpu_vm --flag=value ... -- TRAIN FLAGS`.

Each prints what it would do, and does it with --run. What follows `--` is handed to `jaxmem train` as it is; nodes, tasks and chips
follow from its --topology.
"""
