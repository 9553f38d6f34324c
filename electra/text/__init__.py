"""Text becomes tokens, tokens become shards, shards become batches."""
