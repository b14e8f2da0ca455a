"""What surrounds the steps of a run: progress, trackers, stopping, profiling, and what the devices really did."""
