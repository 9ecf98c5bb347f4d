"""Above the model: what people touch."""
