"""The HTTP server: requests in OpenAI's form, checked and answered by one thread that steps a Batch."""
