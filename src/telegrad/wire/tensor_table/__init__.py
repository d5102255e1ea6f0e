"""How tensors travel beside the pickle stream: a table of their layouts, and their bytes.

`pack` writes the table and `unpack` reads it; `small` is a short cut for small tensors; `memory`
holds received tensors.

Doors: `layout`, `memory`, `pack`, `small`, `unpack`.
"""
