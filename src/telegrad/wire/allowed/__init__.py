"""Allow-lists: which functions other workers may run here, and what their messages may build.

Doors: `allow_list`.
"""
