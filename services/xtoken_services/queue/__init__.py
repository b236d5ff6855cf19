"""The queue server: the engine of `xtoken_core.queue` behind a ZMQ socket. It imports no torch."""
