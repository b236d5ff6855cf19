"""Distillation across tokenizers where it is hardest: numbers that are one token to the student, digits to the teacher.

It knows its text and tokenizers, how teachers and first students are trained from scratch, which runs are compared,
how their models are measured and how the page is written; the compared training itself is `xtoken run`.
"""
