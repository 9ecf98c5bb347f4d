"""Text on top of token ids: an answer while it is generated, and what changes or adds to its drawing."""
