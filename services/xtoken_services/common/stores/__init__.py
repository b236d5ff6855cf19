"""Stores of teachers' signals: opened and checked for a run, and the settings of their build."""
