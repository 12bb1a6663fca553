"""What every backend needs beside its kernels: names of dtypes, limits of a step, refusals, and the
steps in flight."""
