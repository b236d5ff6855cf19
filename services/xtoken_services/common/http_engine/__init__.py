"""Models that another program serves over HTTP: the client, and one module per program with its requests.

`pool` sends requests to one of several servers, `scores` holds the log-probabilities of a text, `engine` is what all
programs have in common, `vllm` and `sglang` are theirs, and `check` compares a server with the files of the model that
it should run. No torch.
"""
