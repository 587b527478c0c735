"""A sweep over the model types of transformers: maps are compared with reruns of a layer with one value row zeroed."""
