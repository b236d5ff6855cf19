"""The generic task queue: samples with fields, and any number of tasks that claim them in an order."""
