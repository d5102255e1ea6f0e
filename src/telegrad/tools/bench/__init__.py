"""telegrad beside torch's own RPC, in one run on one machine: `telegrad bench`.

The only place of the package that uses torch's own RPC: it is the yardstick.
"""
