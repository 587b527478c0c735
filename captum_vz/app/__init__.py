"""`explain`: what a model says about a text, an image or a sound, in one call."""
