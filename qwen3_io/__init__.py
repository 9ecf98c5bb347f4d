"""What comes from disk or the hub, read strictly. Nothing here imports the model."""
