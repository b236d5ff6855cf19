"""xtoken: distil a language model into a student that does not share its tokenizer."""
