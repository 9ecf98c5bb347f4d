"""What numba compiles for qwen3_numba.py, and how it is kept and called."""
