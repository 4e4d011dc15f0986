"""What a choice of patterns costs on a device, when it pays, and what is said about it: for `cost` and `allocate`."""
