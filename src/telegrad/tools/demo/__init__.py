"""A model trained over three processes of this machine: `make demo`.

An embedding table lives on one worker, an encoder on a second, a head on the driver. The demo
trains the model, compares it with the same model trained in one process, and times a step beside
torch's own RPC.
"""
