"""Several sequences in one pass: their caches, and who runs in which step."""
