"""A sweep over transformers itself: every model type against a twin that reruns the layer with one value row zeroed."""
