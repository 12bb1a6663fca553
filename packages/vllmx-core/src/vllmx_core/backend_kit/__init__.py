"""Parts that backends share: limits of a step, the feature store's size, steps in flight."""
