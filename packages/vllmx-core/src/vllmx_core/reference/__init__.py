"""The numpy oracle: op formulas, sampler and backend that all others are checked against."""
