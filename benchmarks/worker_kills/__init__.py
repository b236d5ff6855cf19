"""Teachers and trainers killed at random moments, in real runs: what the other one says, and what is left after."""
