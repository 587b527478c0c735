"""Ways to run a layer with values zeroed, one file each. The room `folded` can be deleted whole."""
