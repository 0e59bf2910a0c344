"""The benchmark: this package and its peers in one run, checked first and then timed."""
