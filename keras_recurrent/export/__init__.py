"""What `model.export` of Keras does for models with layers of this package."""
