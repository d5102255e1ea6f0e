"""telegrad beside torch's own RPC, in one run on one machine: `python -m bench`."""
