"""The traced graph of a model, by torch.export, and errors that name the user's code."""
