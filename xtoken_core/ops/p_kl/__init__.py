"""`p_kl`: KL between a teacher's chunks and a student's, projected onto the teacher's vocabulary.

`p_kl_cross_entropy` is the same together with the student's cross-entropy, for one gradient of both.
"""
