"""Fraction of a whole run's time in which the GPU runs a kernel, and what the host does meanwhile."""
