"""How tensors travel beside the pickle stream: a table of their layouts, and their bytes.

`pack` writes the table and `unpack` reads it; `small` is a shorter way for a few small tensors;
`memory` is what received tensors lie in.

Doors: `layout`, `memory`, `pack`, `small`, `unpack`.
"""
