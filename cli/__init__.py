"""The `sparsekv` command, one file a command."""
