"""From a model to a plan: profile, cost, allocate, filter layers, verify."""
