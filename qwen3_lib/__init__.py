"""What the scripts share, one room for each concern; qwen3.py and tokenizer_utils.py work without it."""
