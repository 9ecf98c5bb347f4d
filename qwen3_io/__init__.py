"""Below the model: what comes from disk or the hub, read strictly."""
