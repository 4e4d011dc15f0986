"""`sparsekv bench`: kernels, prefill and decode beside the fastest dense kernel of the same process."""
