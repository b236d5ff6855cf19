"""Batches of a step: its plan, and its columns padded or packed to what a model reads."""
