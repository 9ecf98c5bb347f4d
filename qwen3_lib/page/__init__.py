"""The page of qwen3_inspect.py: a recorder of forward, the panels' contents, and the HTML that shows them."""
