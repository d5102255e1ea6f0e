"""One call: packed and sent by its caller, run by its callee, and what comes back.

`Agent` makes calls and carries the messages of the layers above; `Service` runs what comes in. The
caller's side continues in `async_call` and `futures`, what a function did travels as an `outcome`.

Doors: `agent`, `arguments`, `async_call`, `error_texts`, `futures`, `kept_errors`, `outcome`,
`plain_arguments`, `quick_functions`, `service`.
"""
