"""Linear attention in chunks: the parts that operations with and without gates share."""
