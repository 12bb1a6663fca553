"""The ops that models are written in, one file each.

A file holds all that core knows of its op: a record with named operands, weights, options
and results, the check of what it is given, its formula in numpy, and its cases for `BackendSuite`.
`vllmx_core.ops.recorder` has the table of all ops, and `Ops`, the face that a model sees.
"""
