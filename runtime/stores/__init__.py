"""Key-value stores: where the KV cache of a layer lives."""
