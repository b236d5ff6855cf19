"""Generation by the student: sampling, decoding in memory of a fixed size, and the weights that a trainer publishes."""
