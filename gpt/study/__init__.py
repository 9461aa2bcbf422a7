"""Measurements and pictures of models and runs. They use the model alone."""
