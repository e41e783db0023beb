"""The traced graph of a model, by torch.export, and errors in the user's own terms."""
