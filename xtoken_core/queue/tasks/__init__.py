"""The generic task queue: samples with fields, and tasks that claim them."""
