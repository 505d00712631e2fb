"""Training on text: data sources, the loss without logits, saved training state, torch modules."""
