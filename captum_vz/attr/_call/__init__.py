"""The arguments of `attribute`: checked, and converted into one form."""
