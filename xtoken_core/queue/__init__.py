"""The queue's rules as pure bookkeeping: sessions, samples and tasks, blocks, rings, and the protocol of a run.

No sockets, clocks or tensors: the server, the in-memory client and the explicit-state model all run this very code.
"""
