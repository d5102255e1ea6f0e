"""The connections between this worker and the others, and which of those are alive.

A `Peer` is another worker as this one sees it: `requests` over `lanes`, and one multiplexed
connection for everything else. `liveness` alone decides that a worker is lost, by the heartbeat of
the multiplexed connection. The `acceptor` lets in whoever proves the group's secret, and the
`lane_server` serves the lanes of others.

Doors: `network`, `peer`, `requests`, `conversation`, `multiplex`, `thread_pool`.
"""
