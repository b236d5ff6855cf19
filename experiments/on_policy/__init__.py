"""On-policy distillation of the digits: the same first students, generated text beside given text."""
