"""`sparse_projection`: probabilities over the student's vocabulary, carried over to the teacher's."""
