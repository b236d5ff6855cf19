"""`chain`: the KL of every chunk by the chain rule, over the pieces that each tokenizer itself cuts."""
