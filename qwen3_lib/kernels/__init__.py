"""The fast engine's parts: how numbers lie in memory, the kernels, their machine code, the threads."""
