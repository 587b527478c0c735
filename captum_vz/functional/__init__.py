"""Pure tensor functions: no modules, no state, every function citing its equation."""
