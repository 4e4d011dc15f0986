"""Plain held-out text: the model continues it."""

from dataclasses import dataclass

import numpy as np

from sparsekv.planner.tasks.documents import Document, Kit, Query, Request
from sparsekv.planner.tasks.draws import Draws
from sparsekv.planner.tasks.text import PieceEncoder, TaskError


@dataclass(frozen=True, slots=True)
class Perplexity:
    """An excerpt of the filler text.

    The one query has an empty question; its answer is the end of the excerpt, for a teacher-forced score. Its text is
    empty: a generated continuation is not compared. Without queries, all of the excerpt is context.

    Attributes:
        most_scored: most tokens of the answer; it is at most a quarter of the excerpt.
    """

    name: str = "perplexity"
    most_scored: int = 256

    def longest_answer(self, encoder: PieceEncoder, length: int) -> int:
        """See `Task`."""
        return min(self.most_scored, length // 4)

    def document(self, kit: Kit, request: Request, draws: Draws) -> Document:
        """See `Task`."""
        scored = self.longest_answer(kit.encoder, request.length) if request.queries else 0
        if request.queries and not scored:
            raise TaskError(f"expected at least 4 tokens of text, found {request.length}; use a longer length")
        ids, _ = kit.filler.excerpt(request.length, draws.rng)
        split = len(ids) - scored
        query = Query(np.zeros(0, np.int32), ids[split:], "")
        return Document(ids[:split], np.ones(split, np.bool_), (query,) if scored else ())
