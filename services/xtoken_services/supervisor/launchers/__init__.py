"""Launchers: start the processes of a run on this machine or on a Ray cluster."""
