"""Exporters of `model.export` for models with layers of this package."""
