"""What a plain folder isn't: the hub, published quantizations, GGUF, adapters, and our own files."""
