"""A plan at work in a layer, on torch tensors alone: no model, no host."""
