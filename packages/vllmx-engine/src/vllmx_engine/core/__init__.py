"""The side that decides: the step loop, the scheduler, sequences and their blocks."""
