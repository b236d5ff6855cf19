"""Losses of the field beside ours, each a class for `xtoken run --loss`. References, written for reading."""
