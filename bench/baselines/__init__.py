"""Rules of other methods, each a mode of `compare`: what curves show beside our plans."""
