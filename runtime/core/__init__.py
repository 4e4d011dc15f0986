"""Says what a plan means for a layer, on torch tensors alone: no model, no host."""
