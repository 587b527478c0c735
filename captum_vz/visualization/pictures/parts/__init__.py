"""What all pictures share: tokens of an axis, colour scales, sizes, labels and fonts."""
