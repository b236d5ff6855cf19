"""What a mask on white space changes when the chain divergence trains on source code."""
