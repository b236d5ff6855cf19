"""The transfer queue beside TransferQueue and plain pyzmq, in one run: `python -m benchmarks.queue`."""
