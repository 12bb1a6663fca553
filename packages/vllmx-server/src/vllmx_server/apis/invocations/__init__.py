"""SageMaker's route, which stands for several others."""
