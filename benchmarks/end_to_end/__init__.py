"""A whole run at real model sizes beside the plain serial loop: what both read, what each does, how they compare."""
