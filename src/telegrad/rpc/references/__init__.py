"""Remote references: values that stay on the worker that owns them while others hold `RRef`s.

`protocol` decides how long a value lives, as a state machine without threads or sockets; `table`
carries out what it decides.

Doors: `rref`, `proxy`, `fetch`, `lookup`, `records`, `table`, `texts`.
"""
