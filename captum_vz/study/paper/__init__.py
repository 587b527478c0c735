"""The three evaluations of Mohebbi et al. 2023, of any model, with all methods."""
