"""The command line and what it runs: `telegrad run`, `demo`, `bench` and `doctor`."""
