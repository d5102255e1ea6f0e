"""In the place of `torch.distributed.autograd`."""

from telegrad.autograd import *  # noqa: F403
from telegrad.autograd import (  # noqa: F401
    _current_context,
    _get_debug_info,
    _get_max_id,
    _init,
    _is_valid_context,
    _new_context,
    _release_context,
    _retrieve_context,
)
