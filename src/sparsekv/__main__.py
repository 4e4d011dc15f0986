"""`python -m sparsekv`."""

from sparsekv.cli.main import main

if __name__ == "__main__":
    main()
