"""Which learner a record belongs to, and which of its incarnations is the newest."""

from __future__ import annotations

from contextlib import suppress
from threading import Lock

from paceline.errors import ConflictError, InvalidInputError, PacelineError, ReplacedError
from paceline.replay.scripts import NOTE_LEARNER
from paceline.replay.store import RedisStore

MAX_ID_LENGTH = 64


class LearnerHold:
    """The learner that may train on the record: one of a run's folders, in its newest incarnation.

    Two folders of one run would count incarnations and versions apart, so that one number meant two policies; and a
    learner that was held up while another took its run over must not go on beside it. Known in memory, and in Redis as
    soon as that takes it. Any number of threads may use it.
    """

    def __init__(self, store: RedisStore) -> None:
        """`load` says what the record knows."""
        self._store, self._lock = store, Lock()
        self._id, self._incarnation, self._noted = "", 0, True

    def load(self) -> None:
        """Read what the record says. Raises UnavailableError while Redis is away."""
        text = bytes(self._store.command("HGET", self._store.key("meta"), "learner") or b"").decode(errors="replace")
        identity, _, incarnation = text.partition(" ")
        if incarnation.isdecimal():
            self._id, self._incarnation = identity, int(incarnation)

    def take(self, learner_id: str, incarnation: int, *, has_rows: bool) -> None:
        """A learner wants the record; from now on it has it, and those before it do not.

        Args:
            learner_id: as its folder has it; empty: the caller is no learner, or one that says nothing of itself.
            has_rows: whether rows were ever stored, which came about under the learner that had the record before.

        Raises:
            InvalidInputError: the id or the incarnation is malformed.
            ConflictError: the rows belong to another learner.
            ReplacedError: a newer incarnation has the record.
        """
        if not learner_id:
            return
        if len(learner_id) > MAX_ID_LENGTH or not learner_id.isalnum() or incarnation < 1:
            raise InvalidInputError(
                f"learner_id {learner_id[:MAX_ID_LENGTH]!r} with incarnation {incarnation}: expected up to "
                f"{MAX_ID_LENGTH} letters and digits, and an incarnation of 1 or more"
            )
        with self._lock:
            if self._id and learner_id != self._id and has_rows:
                raise ConflictError(
                    f"the rows of this run came about under learner {self._id}, and learner {learner_id} wants them: "
                    "the run's folder is not the one that it began with; bring that back (the learner's volume, "
                    "run.directory), or remove the rows by `paceline replay delete RUN`, or choose another run.id"
                )
            if learner_id == self._id:
                self._require_newest(incarnation)
            if (learner_id, incarnation) != (self._id, self._incarnation):
                self._id, self._incarnation, self._noted = learner_id, incarnation, False
        # A Redis that takes nothing now is told later: rows can be sampled meanwhile, and a learner may begin to.
        with suppress(PacelineError):
            self.keep()

    def require_newest(self, incarnation: int) -> None:
        """Raise ReplacedError if a newer incarnation than this has the record; 0 is no learner's, and passes."""
        with self._lock:
            self._require_newest(incarnation)

    def keep(self, *, again: bool = False) -> None:
        """Write to Redis what it does not know; `again`: since it may have lost what it knew.

        Raises:
            ReplacedError: another replay process owns the run. UnavailableError: Redis is away.
        """
        with self._lock:
            text, known = f"{self._id} {self._incarnation}", self._noted and not again
        if not self._id or known:
            return
        keys = [self._store.key("owner"), self._store.key("meta")]
        if self._store.run_script(NOTE_LEARNER, keys, [self._store.token, text]) == "stored":
            with self._lock:
                self._noted = text == f"{self._id} {self._incarnation}"

    def _require_newest(self, incarnation: int) -> None:
        if 0 < incarnation < self._incarnation:
            raise ReplacedError(
                f"learner incarnation {self._incarnation} has this run now, and incarnation {incarnation} asks: it was "
                "replaced and has to end"
            )
