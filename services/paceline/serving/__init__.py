"""Serving snapshots by `ParameterService`, the same by the learner's endpoint and by a relay.

A room of its own since both need all of it and neither may import the other. What differs is handed in: what becomes of
the reports of collectors (`ReplicaReports`), whose clock the answers tell, and the name of the service. No torch.
"""
