"""Two node groups of one GPU each on one host, by torchrun and by Ray, beside one group of two GPUs."""
