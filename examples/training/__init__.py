"""The data sets of the models in `models/`, each with its scores and baselines."""
