"""A relay: fetches the learner's snapshots once and serves them to many, by the same protocol. No torch.

Relays form a tree of any depth. Reports of collectors go up it, snapshots and the learner's time come down. Nobody
joins: a relay that dies is replaced by any other.
"""
