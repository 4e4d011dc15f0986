"""What a model answers by a plan, beside what it answers dense: for `verify` and `eval`."""
