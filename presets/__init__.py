"""Sizes of the models, as the papers print them: one table a family."""
