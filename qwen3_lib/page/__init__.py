"""The page of qwen3_inspect.py: what is recorded, what is computed from it, and the HTML that shows it."""
