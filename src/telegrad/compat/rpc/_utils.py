"""In the place of `torch.distributed.rpc._utils`, which has nothing that is needed here: telegrad's
workers tell each other of joining and leaving."""

__all__: list[str] = []
