"""Below the model: input from disk or the hub, read strictly."""
