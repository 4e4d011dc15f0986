"""`sparsekv bench`: kernels and prefill beside the fastest dense kernel of the same process."""
