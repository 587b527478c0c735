"""Ways to run a layer with values zeroed, one file each. `folded` is a faster form of `packed` and can be deleted whole."""
