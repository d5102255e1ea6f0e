"""Remote references: values that stay on the worker that owns them, while others hold `RRef`s.

`protocol` decides how long a value lives, as a state machine without threads or sockets; `steps`
carries out its decisions, and `table` turns what happens into its events. `in_messages` states how
references in messages are counted.

Doors: `rref`, `proxy`, `fetch`, `records`, `table`, `texts`.
"""
