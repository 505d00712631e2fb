"""Training and inference on several devices."""
