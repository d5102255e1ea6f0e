"""A call: packed and sent by its caller, run by its callee, and its result or exception sent back.

`Agent` makes calls and carries the messages of the layers above; `Service` runs incoming messages.

Doors: `agent`, `arguments`, `async_call`, `futures`, `outcome`, `quick_functions`, `service`.
"""
