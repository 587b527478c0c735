"""The folder of a study: files that are whole or missing, shards, and the weights that made them."""
