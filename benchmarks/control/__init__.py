"""The control plane's speed, and what its readers cost a run."""
