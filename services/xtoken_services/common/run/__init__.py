"""A run as a whole: defaults, resolution and checks before a start, GPU memory, resuming, baseline and warnings."""
