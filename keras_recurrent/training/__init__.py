"""Training on text: data, the loss without logits, saved training states, modules of torch."""
