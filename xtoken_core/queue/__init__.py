"""The queue's state without sockets, clocks or tensors: the server, the in-memory client and the state model run it.

`engine` answers requests. A partition is either the queue of one training run (`queue.run`) or a generic task queue
(`queue.tasks`); the two share `partition`, `samples`, `store` and `sessions`, and know nothing of each other.
docs/glossary.md explains the terms.
"""
