"""Record a layer, replay it: the only place that registers hooks."""
