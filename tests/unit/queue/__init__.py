"""Tests of the queue's rules; `model` and `explore` are the explicit-state model that one of them runs."""
