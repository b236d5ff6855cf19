"""Models: their files on the Hub, in GGUF files and in directories, loading, and attention on packed rows."""
