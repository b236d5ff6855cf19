"""Stores of teachers' signals: opened and checked for a run, and the settings of their build."""

SIGN_OF_LIFE = "writer-{rank}.alive"
"""File in a build's directory that a writer changes when its teacher reports something new."""
