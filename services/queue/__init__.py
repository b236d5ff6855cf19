"""The queue server: the engine of `xtoken_core.protocol` behind a ZMQ socket. It imports no torch."""
