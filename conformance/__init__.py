"""Torch's own RPC suites, out of the installed wheel, run on telegrad: `python -m conformance`."""
