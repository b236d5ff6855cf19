"""Code that several processes share, in folders by subject.

From the bottom up: `files`; `processes`; `batches`, `models`, `tokenizers`, `generation` and `http_engine`, none of
which imports another; `text`; `tables` and `stores`; `run`. An import contract holds them to this order.
"""
