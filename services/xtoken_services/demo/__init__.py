"""The demo: text, tokenizers, a teacher and a student made on the spot, and two runs of the real pipeline.

It knows how its parts are made and how its table and report are read from the runs' files; training itself is
left to the workers.
"""
