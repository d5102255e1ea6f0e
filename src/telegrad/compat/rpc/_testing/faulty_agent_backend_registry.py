"""In the place of `torch.distributed.rpc._testing.faulty_agent_backend_registry`.

Importing the package registers `BackendType.FAULTY_TENSORPIPE`.
"""
