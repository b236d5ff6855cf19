"""The transfer queue beside TransferQueue and raw pyzmq, in one run: `python -m benchmarks.queue`."""
