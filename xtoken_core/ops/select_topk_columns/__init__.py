"""`select_topk_columns`: the vocabulary columns with the largest maximum over all rows."""
